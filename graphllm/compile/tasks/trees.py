"""Trees of drafts: what may be verified as one, and how a draft graph fills one.

A tree (`TokenTree`) is data of the artifact. Its drafts lie in the slot state "drafts" in the order of the nodes; the
main graph verifies all of them in one step (`attend_tree`, `accept_tree`, `keep_path`). A draft graph with a head for
each draft fills it at once. Others, which read their own hidden states again, run once for each level after the first:
over all nodes with children, `TokenTree.inner`, as rows of one step that see only their ancestors. So each run makes
the drafts of one level more, and the earlier ones again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphllm.compile.tasks.sampling import Stage, Values
from graphllm.config import CompileConfig, ConfigError
from graphllm.config.token_tree import DynamicTree, TokenTree
from graphllm.ir.model import Drafts, Model
from graphllm.ops.rows.store_slots import store_slots
from graphllm.ops.sampling.token_logprobs import token_logprobs
from graphllm.ops.speculation.record_drafts import record_drafts
from graphllm.program.specs import BLOCK_TOKENS, StateSpec

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
    if not drafters:
        raise ConfigError(f"{_NAME}: drafts of a tree come from a draft model; give one, or leave it out")
    if isinstance(tree, DynamicTree) and (drafters[0].hidden(c, 1) is None or drafters[0].drafts_at_once(c)):
        raise ConfigError(
            f"{_NAME}: a tree grows by what is likely behind each draft, which EAGLE heads and MTP layers tell; use "
            "method eagle3, eagle or mtp, or give a list of paths"
        )
    if tree.levels < tree.drafts and drafters[0].hidden(c, 1) is None:
        raise ConfigError(
            f"{_NAME}: a draft model that is a language model of its own guesses one run of tokens; use method eagle3, "
            "eagle, mtp or medusa, or leave it out"
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


def along_path(v: Values, tree: TokenTree | DynamicTree) -> tuple[Tensor, Tensor, Tensor]:
    """Where the tokens of a draft graph's first run come from: the step's row of each token [T], with tokens of the
    kept path first and in order; the row of each next token [T]; and the row of each sequence's newest token [S]."""
    sequence_T, start_S = v["step.sequence_ids"].long(), v["step.query_start_loc"][:-1].long()
    path_SL = torch.index_select(v["state.path"], 0, v["step.slots"]).long()
    at_T = torch.arange(sequence_T.shape[0], device=sequence_T.device)
    first_T = torch.index_select(start_S, 0, sequence_T)
    width, levels = path_SL.shape[1], tree.levels

    def inside(row: Tensor) -> Tensor:  # of padding, too
        return torch.minimum(row, at_T.new_full((1,), at_T.shape[0] - 1)).clamp(min=0)

    def source(place_T: Tensor) -> Tensor:
        kept_T = torch.index_select(path_SL.flatten(), 0, sequence_T * width + place_T.clamp(0, levels))
        return inside(first_T + torch.where(place_T <= levels, kept_T, place_T))

    place_T = at_T - first_T
    return source(place_T), source(place_T + 1), inside(start_S + path_SL[:, levels + 1])


# ---- Draft graphs that run once for each level.

STATE = "tree_hidden"


def hidden_of_nodes(tree: TokenTree | DynamicTree, width: int) -> tuple[StateSpec, ...]:
    """What a draft graph keeps of a sequence's inner nodes between its runs: the hidden states that it has made."""
    return (StateSpec(STATE, "slot", (tree.rows * width,), "model", "none"),) if tree.rows else ()


def likeliest(logits_RV: Tensor, tree: TokenTree) -> Tensor:
    """[R, n]: a row's likeliest tokens in order, as many as the largest number of a node's children."""
    return _ranked(logits_RV, max(tree.choices))


def rows_of(row_S: Tensor, v: Values) -> Tensor:
    """[R]: rows of each sequence, and after them the last one again: the head's rows have a symbol of their own, since
    the first run has one for each sequence and others several."""
    at_R = numbers(v["step.logits_indices"])
    return torch.index_select(row_S, 0, torch.minimum(at_R, at_R.new_full((1,), row_S.shape[0] - 1)))


def next_level(tree: TokenTree, last_position: int) -> tuple[Stage, Stage]:
    """The stages before a draft graph's own units in a further run, and after its head."""
    resolved = ("token_ids", "positions", "context_lens", "seq_lens", "logits_indices", "hidden")
    return (
        Stage("next", lambda v: _inner_rows(v, tree, last_position), tuple(f"step.{n}" for n in resolved)),
        Stage("choose_next", lambda v: _choose_behind_inner(v, tree, last_position), ()),
    )


def choose_first(v: Values, tree: TokenTree, last_position: int) -> tuple[()]:
    """Of each sequence, the tokens after the root become drafts."""
    slots_S = v["step.slots"]
    at_S = numbers(slots_S)
    row_S = torch.index_select(v["step.logits_indices"], 0, at_S)
    ranked_SC = torch.index_select(v["drafted"], 0, at_S)
    drafts_SJ = torch.stack([ranked_SC[:, tree.choices[node - 1]] for node in tree.children[0]], -1)
    position_S = torch.index_select(v["step.positions"], 0, row_S)
    record(v, drafts_SJ, position_S, torch.zeros_like(slots_S), last_position)
    store_slots(torch.index_select(v["x"], 0, row_S), slots_S, v["state.draft_hidden"])
    return ()


def _inner_rows(v: Values, tree: TokenTree, last_position: int) -> tuple[Tensor, ...]:
    """The inner nodes of each sequence: their drafts, with the hidden states that these came from. Their positions
    follow the newest token's by their depths, and they lie in the cache one after the other."""
    inner, nodes, sequence_T = tree.inner, v[f"state.{STATE}"], v["step.sequence_ids"].long()
    N, count, K = nodes.shape[0], len(inner), v["state.drafts"].shape[1]
    slot_T = torch.index_select(v["step.slots"], 0, sequence_T).long()
    place_T = numbers(sequence_T) - torch.index_select(v["step.query_start_loc"], 0, sequence_T)
    place_T = place_T.clamp(0, count - 1)  # of padding, too
    draft_T = slot_T * K + _told(place_T, [node - 1 for node in inner])
    token_T = torch.index_select(v["state.drafts"].view(-1), 0, draft_T).clamp(min=0)
    before = [inner.index(parent) if (parent := tree.parents[node]) else -1 for node in inner]
    parent_T = _told(place_T, before)
    at_T = slot_T * count + parent_T.clamp(min=0)
    own_TD = torch.index_select(nodes.view(N * count, -1), 0, at_T)
    root_TD = torch.index_select(v["state.draft_hidden"], 0, slot_T)
    hidden_TD = torch.where((parent_T >= 0)[:, None], own_TD, root_TD)
    first_T = torch.index_select(v["state.draft_position"], 0, slot_T)
    depths = [tree.depths[node] - 1 for node in inner]
    position_T = (first_T + _told(place_T, depths)).clamp(max=last_position).to(torch.int32)
    # Where no room is left for all, known rows are overwritten: nothing is verified there any more.
    end_S = torch.index_select(v["state.draft_position"], 0, v["step.slots"]) + count
    end_S = end_S.clamp(max=last_position + 1)
    row_R = numbers(v["step.logits_indices"]).to(torch.int32)
    return token_T, position_T, position_T + 1, end_S, row_R, hidden_TD


def _choose_behind_inner(v: Values, tree: TokenTree, last_position: int) -> tuple[()]:
    """The tokens after each inner node become drafts, and their hidden states are kept for the next level."""
    start_S, ranked_RC, slots_S = v["step.query_start_loc"][:-1], v["drafted"], v["step.slots"]
    last = ranked_RC.shape[0] - 1

    def row(node: int) -> Tensor:
        at_S = start_S + tree.inner.index(node)
        return torch.minimum(at_S, at_S.new_full((1,), last))  # of padding, too

    first = len(tree.children[0])
    behind = range(first + 1, len(tree.parents))
    drafts_SJ = torch.stack(
        [torch.index_select(ranked_RC[:, tree.choices[n - 1]], 0, row(tree.parents[n])) for n in behind], -1
    )
    before_S = torch.index_select(v["state.draft_position"], 0, slots_S) - 1  # which stays
    record(v, drafts_SJ, before_S, torch.zeros_like(slots_S) + first, last_position)
    rows_SD = torch.cat([torch.index_select(v["x"], 0, row(node)) for node in tree.inner], -1)
    store_slots(rows_SD, slots_S, v[f"state.{STATE}"])
    return ()


def record(v: Values, drafts_SJ: Tensor, position_S: Tensor, places_S: Tensor, last_position: int) -> None:
    kept = (v[f"state.{n}"] for n in ("drafts", "draft_count", "draft_token", "draft_position"))
    record_drafts(drafts_SJ, position_S, places_S, v["step.slots"], *kept, last_position)


def numbers(like: Tensor) -> Tensor:
    return torch.arange(like.shape[0], device=like.device)


def _told(place_T: Tensor, values: Sequence[int]) -> Tensor:
    """values[place], as arithmetic: a program has no tensors of constants."""
    found_T = torch.zeros_like(place_T) + values[0]
    for place, value in enumerate(values[1:], 1):
        found_T = torch.where(place_T == place, value, found_T)
    return found_T
