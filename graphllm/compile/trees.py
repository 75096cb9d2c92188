"""Trees of drafts: what may be verified as one, and how a draft graph that makes all its drafts at once fills one.

A tree (`TokenTree`) is data of the artifact. Its drafts lie in the slot state "drafts" in the order of the nodes; the
main graph verifies all of them in one step (`attend_tree`, `accept_tree`, `keep_path`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphllm.config import CompileConfig, ConfigError
from graphllm.config.token_tree import TokenTree
from graphllm.ir.model import Drafts, Model
from graphllm.ir.specs import BLOCK_TOKENS, StateSpec
from graphllm.ops.token_logprobs import token_logprobs

_NAME = "speculative_token_tree"


def check_tree(model: Model, c: Any, config: CompileConfig, layers: Sequence[Sequence[StateSpec]]) -> None:
    """Raise ConfigError where a model, or what drafts for it, cannot verify the tree. layers: the states of each."""
    tree = config.tree
    if tree is None:
        return
    states = [s for of_layer in layers for s in of_layer if s.axis in ("block", "slot")]
    if any(s.retention == "last" for s in states):
        raise ConfigError(
            f"{_NAME}: the model has recurrent states, which are rolled back along one run of drafts; leave it out"
        )
    if other := [s.name for s in states if not _is_cache(s)]:
        raise ConfigError(f"{_NAME}: the model keeps {other[0]!r}, not keys and values alone; leave it out")
    if counting := [s.name for graph in model.graphs for s in graph.inputs(c) if s.counts]:
        raise ConfigError(f"{_NAME}: the model's input {counting[0]!r} counts tokens one by one; leave it out")
    drafters = [graph for graph in model.graphs if graph.task == "draft"]
    if tree.levels == len(tree.paths):
        return
    if not drafters:
        raise ConfigError(f"{_NAME}: drafts that branch come from a draft model; give one, or leave it out")
    if not drafters[0].drafts_at_once(c):
        raise ConfigError(
            f"{_NAME}: of draft models those fill a tree that have a head for each draft; use method medusa"
        )


def _is_cache(state: StateSpec) -> bool:
    return state.axis == "block" and len(state.shape) == 4 and state.shape[0] == 2 and state.shape[2] == BLOCK_TOKENS


def fill(made: Drafts, tree: TokenTree) -> Tensor:
    """[S, n] int32: the drafts of a tree's nodes, without the root: of each the token of the head of its depth that its
    path names."""
    of_level = [
        _ranked(logits_SV, max(path[-1] for path in tree.paths if len(path) == level))
        for level, logits_SV in enumerate(made.logits[: tree.levels], 1)
    ]
    return torch.stack([of_level[len(path) - 1][:, path[-1]] for path in tree.paths], -1)


def _ranked(logits_SV: Tensor, last: int) -> Tensor:
    """[S, last + 1]: the likeliest tokens in their order."""
    if last == 0:
        return logits_SV.argmax(-1, keepdim=True)
    count = last + 1
    none_S = torch.zeros(logits_SV.shape[0], dtype=torch.int32, device=logits_SV.device)
    scores_SX = token_logprobs(logits_SV, none_S, none_S - 1, none_S, count)
    return scores_SX[:, 2 + count :].long()


def along_path(v: dict[str, Any], tree: TokenTree) -> tuple[Tensor, Tensor, Tensor]:
    """Where the step's tokens of a draft graph's first run come from, those that a tree has kept first and in their
    order [T], where the one behind each does [T], and the row of each sequence's newest token [S]."""
    sequence_T, start_S = v["step.sequence_ids"].long(), v["step.query_start_loc"][:-1].long()
    path_SL = torch.index_select(v["state.path"], 0, v["step.slots"]).long()
    at_T = torch.arange(sequence_T.shape[0], device=sequence_T.device)
    first_T = torch.index_select(start_S, 0, sequence_T)
    width, levels = path_SL.shape[1], tree.levels

    def source(place_T: Tensor) -> Tensor:
        kept_T = torch.index_select(path_SL.flatten(), 0, sequence_T * width + place_T.clamp(0, levels))
        found_T = first_T + torch.where(place_T <= levels, kept_T, place_T)
        return torch.minimum(found_T, at_T.new_full((1,), at_T.shape[0] - 1)).clamp(min=0)

    place_T = at_T - first_T
    return source(place_T), source(place_T + 1), start_S + path_SL[:, levels + 1]
