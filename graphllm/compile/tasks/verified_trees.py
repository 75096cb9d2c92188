"""Verification of trees of drafts, given ones and dynamic ones; and the choice of a verification.

A tree (`TokenTree`) is data of the artifact. Its drafts lie in the slot state "drafts" in the order of the nodes; the
main graph verifies all of them in one step (`attend_tree`, `accept_tree`, `keep_path`). Of a dynamic tree the artifact
has only the sizes; the drafting graph writes in each step where the nodes stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphllm.compile.tasks.task import TaskUnit, Values
from graphllm.compile.tasks.verification import ChainVerification, Verification, record, sampled
from graphllm.config import CompileConfig, ConfigError
from graphllm.config.token_tree import DynamicTree, TokenTree
from graphllm.ir.model import Graph, Model
from graphllm.ops.speculation.accept_dynamic_tree import accept_dynamic_tree
from graphllm.ops.speculation.accept_tree import accept_tree
from graphllm.ops.speculation.keep_path import keep_path
from graphllm.program.specs import BLOCK_TOKENS, InputSpec, StateSpec

# Of each row, the nodes on the path to it in the tree of drafts that its sequence verifies; -1 without one.
ANCESTORS = InputSpec("ancestors", ("T",), "int64", neutral=-1)
# Slot states of a dynamic tree's nodes: the node before each; bits of the nodes on its path; how far the root is.
NODE_STATES = ("tree_parents", "tree_bits", "tree_depths")
_NAME = "speculative_token_tree"


class TreeVerification(ChainVerification):
    """The drafts of a tree that has a known shape: the longest path of right drafts is kept."""

    def __init__(self, config: CompileConfig, tree: TokenTree | DynamicTree) -> None:
        super().__init__(config)
        self.tree = tree

    def check(self, model: Model, c: Any, layers: Sequence[Sequence[StateSpec]]) -> None:
        states = [s for of_layer in layers for s in of_layer if s.axis in ("block", "slot")]
        if any(s.retention == "last" for s in states):
            raise ConfigError(
                f"{_NAME}: the model has recurrent states, which are rolled back along one run of drafts; leave it out"
            )
        if other := [s.name for s in states if not _is_cache(s)]:
            raise ConfigError(
                f"{_NAME}: the model keeps {other[0]!r}, and not only keys and values or latents; leave it out"
            )
        if counting := [s.name for graph in model.graphs for s in graph.inputs(c) if s.counts]:
            raise ConfigError(f"{_NAME}: the model's input {counting[0]!r} counts tokens one by one; leave it out")
        drafters = [graph for graph in model.graphs if graph.task == "draft"]
        if not drafters:
            raise ConfigError(f"{_NAME}: drafts of a tree come from a draft model; give one, or leave it out")
        self.check_drafter(drafters[0], c)

    def check_drafter(self, drafter: Graph, c: Any) -> None:
        """Raise ConfigError for a draft graph that cannot fill the tree."""
        if self.tree.levels < self.tree.drafts and drafter.hidden(c, 1) is None:
            raise ConfigError(
                f"{_NAME}: a draft model that is a language model of its own guesses one run of tokens; use method "
                "eagle3, eagle, mtp or medusa, or leave it out"
            )

    def inputs(self) -> tuple[InputSpec, ...]:
        return (ANCESTORS,)

    def further_states(self) -> tuple[StateSpec, ...]:
        """path: the nodes of the tree that the last step kept, see `accept_tree`."""
        return (StateSpec("path", "slot", (self.tree.levels + 2,), "int32", "none"),)

    def sample(self, name: str, logits: str, part: str = "") -> TaskUnit:
        """The kept tokens are the tokens of rows "path_rows"."""
        outputs = ("tokens", "kept", "drafted", "path_rows", "path", "row_tokens")
        return TaskUnit(name, lambda v: self._verify_tree(v, logits), outputs, part)

    def _verify_tree(self, v: Values, logits: str) -> tuple[Tensor, ...]:
        sampled_R = sampled(v, logits)
        rows = (v["step.row_slots"], v["drafts"], v["step.logits_indices"])
        where = (v[f"step.{n}"] for n in ("sequence_ids", "query_start_loc", "row_start_loc", "slots"))
        kept = self.accept(v, sampled_R, *rows, *where, v["state.rejected"], v["state.path"])
        tokens_R, rows_R, newest_R, kept_R, kept_S, drafted_S, path_SD = kept
        return record(v, tokens_R, newest_R, kept_R), kept_S, drafted_S, rows_R, path_SD, sampled_R

    def accept(self, v: Values, *given: Tensor) -> tuple[Tensor, ...]:
        """Call the op that accepts. given: its first arguments."""
        assert isinstance(self.tree, TokenTree)
        return accept_tree(*given, self.tree.parents)

    def after_sampling(self, caches: Sequence[tuple[str, int]]) -> tuple[TaskUnit, ...]:
        names = tuple(name for name, _ in caches)
        return (TaskUnit("keep_path", lambda v: _keep_path(v, caches), (), states=names),)

    def row_tokens(self, v: Values) -> Tensor:
        return v["row_tokens"]

    def kept_rows(self, rows_RX: Tensor, v: Values) -> Tensor:
        return torch.index_select(rows_RX, 0, v["path_rows"])

    def along_path(self, v: Values) -> tuple[Tensor, Tensor, Tensor]:
        """The kept nodes come first, in their order."""
        sequence_T, start_S = v["step.sequence_ids"].long(), v["step.query_start_loc"][:-1].long()
        path_SL = torch.index_select(v["state.path"], 0, v["step.slots"]).long()
        at_T = torch.arange(sequence_T.shape[0], device=sequence_T.device)
        first_T = torch.index_select(start_S, 0, sequence_T)
        width, levels = path_SL.shape[1], self.tree.levels

        def inside(row: Tensor) -> Tensor:  # of padding, too
            return torch.minimum(row, at_T.new_full((1,), at_T.shape[0] - 1)).clamp(min=0)

        def source(place_T: Tensor) -> Tensor:
            kept_T = torch.index_select(path_SL.flatten(), 0, sequence_T * width + place_T.clamp(0, levels))
            return inside(first_T + torch.where(place_T <= levels, kept_T, place_T))

        place_T = at_T - first_T
        return source(place_T), source(place_T + 1), inside(start_S + path_SL[:, levels + 1])


class DynamicTreeVerification(TreeVerification):
    """The drafts of a tree that grows anew in each step (EAGLE-2)."""

    node_inputs = ("ancestors",)

    def check_drafter(self, drafter: Graph, c: Any) -> None:
        if drafter.hidden(c, 1) is None or drafter.drafts_at_once(c):
            raise ConfigError(
                f"{_NAME}: a tree grows by what is likely after each draft, which EAGLE heads and MTP layers say; "
                "use method eagle3, eagle or mtp, or give a list of paths"
            )

    def further_states(self) -> tuple[StateSpec, ...]:
        assert isinstance(self.tree, DynamicTree)
        dtypes = ("int32", "int64", "int32")
        nodes = (StateSpec(n, "slot", (self.tree.nodes,), d, "none") for n, d in zip(NODE_STATES, dtypes, strict=True))
        return (*super().further_states(), *nodes)

    def moved(self, v: Values, resolved: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        depth_T, bits_T = _nodes_of_rows(v)
        ids_T, drafts_T, position_T, context_T, lengths_S = resolved
        return (ids_T, drafts_T, position_T + depth_T, context_T + depth_T, lengths_S), (bits_T,)

    def accept(self, v: Values, *given: Tensor) -> tuple[Tensor, ...]:
        nodes = (torch.index_select(v[f"state.{n}"], 0, v["step.slots"]) for n in NODE_STATES)
        return accept_dynamic_tree(*given, *nodes, self.tree.levels)


_CLASSES = {TokenTree: TreeVerification, DynamicTree: DynamicTreeVerification}


def verification_of(config: CompileConfig) -> Verification:
    """How steps verify with these settings."""
    if config.longest_query == 1:
        return Verification(config)
    return ChainVerification(config) if config.tree is None else _CLASSES[type(config.tree)](config, config.tree)


def _is_cache(state: StateSpec) -> bool:
    """Whether attention to it follows branches, and `keep_path` moves its rows: keys and values, or latents."""
    latents = len(state.shape) == 2 and state.shape[0] == BLOCK_TOKENS and state.plain > 0
    kv = len(state.shape) == 4 and state.shape[0] == 2 and state.shape[2] == BLOCK_TOKENS
    return state.axis == "block" and (kv or latents)


def _nodes_of_rows(v: Values) -> tuple[Tensor, Tensor]:
    """Of each token of a step its depth [T] int32, and the bits of its ancestors [T] int64. They are 0 and -1 for a
    token that is no node of a tree, for which the host has given a negative number."""
    given_T, bits_NM, depths_NM = v["step.ancestors"], v["state.tree_bits"], v["state.tree_depths"]
    sequence_T, M = v["step.sequence_ids"].long(), bits_NM.shape[1]
    at_T = torch.arange(given_T.shape[0], device=given_T.device)
    place_T = (at_T - torch.index_select(v["step.query_start_loc"], 0, sequence_T)).clamp(0, M - 1)
    node_T = torch.index_select(v["step.slots"], 0, sequence_T).long() * M + place_T
    bits_T, depth_T = (torch.index_select(t.view(-1), 0, node_T) for t in (bits_NM, depths_NM))
    is_node_T = given_T >= 0
    return torch.where(is_node_T, depth_T, 0), torch.where(is_node_T, bits_T, -1)


def _keep_path(v: Values, caches: Sequence[tuple[str, int]]) -> tuple[()]:
    for name, group in caches:
        where = (v[f"step.block_table.{group}"], v["step.query_start_loc"], v["step.seq_lens"])
        keep_path(v[name], *where, v["path"], v["kept"])
    return ()
