"""Drafting a tree level by level.

A draft graph that reads its own hidden states again runs once for each level after the first: over all nodes that have
children, `TokenTree.inner`, as rows of one step that see only their ancestors. So each run makes the drafts of one
level more, and makes the earlier drafts again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from graphllm.compile.tasks.drafting import Drafting, named, ranked, record
from graphllm.compile.tasks.task import ProgramUnits, TaskUnit, Values
from graphllm.config.token_tree import DynamicTree, TokenTree
from graphllm.ir.model import Drafts
from graphllm.ops.rows.store_slots import store_slots
from graphllm.program.program import DraftReach
from graphllm.program.specs import StateSpec

STATE = "tree_hidden"


class ByLevels(Drafting, ABC):
    """What given and dynamic trees have in common."""

    @property
    def tree(self) -> TokenTree | DynamicTree:
        """The tree that is filled."""
        assert self.config.tree is not None
        return self.config.tree

    @property
    def lookahead(self) -> int:
        return self.tree.rows if self.keeps else 0

    @property
    def rows(self) -> int:
        return self.tree.rows

    def reach(self) -> DraftReach:
        return msgspec.structs.replace(super().reach(), by_levels=True)

    def further_states(self) -> tuple[StateSpec, ...]:
        """tree_hidden: the hidden states of a sequence's inner nodes, between runs."""
        if self.hidden is None or not self.hidden.width or not self.tree.rows:
            return ()
        return (StateSpec(STATE, "slot", (self.tree.rows * self.hidden.width,), "model", "none"),)

    def logits_rows(self, last_S: Tensor, v: Values) -> Tensor:
        """The head's rows have a symbol of their own, as the first run has one of each sequence and others several. So
        the last row stands again in their place."""
        at_R = numbers(v["step.logits_indices"])
        return torch.index_select(last_S, 0, torch.minimum(at_R, at_R.new_full((1,), last_S.shape[0] - 1)))

    def programs(self) -> Mapping[str, ProgramUnits]:
        first = ProgramUnits(self.before_first(), (self.choose(),))
        if not self.tree.rows:
            return {"first": first}
        return {"first": first, "next": ProgramUnits((self.inner(),), (TaskUnit("choose_next", self.choose_next, ()),))}

    @abstractmethod
    def inner(self) -> TaskUnit:
        """The unit before the graph's own in a further run: the drafts that have children."""

    @abstractmethod
    def choose_next(self, v: Values) -> tuple[()]:
        """After the head of a further run, the children become drafts."""


class Levels(ByLevels):
    """A tree that has its shape in the artifact."""

    @property
    def tree(self) -> TokenTree:
        assert isinstance(self.config.tree, TokenTree)
        return self.config.tree

    def chosen(self, made: Drafts, v: Values) -> Tensor:
        """[R, n]: as many of a row's likeliest tokens as any node has children, in their order."""
        return named(ranked(made.logits[0], max(self.tree.choices)), made.ids)

    def inner(self) -> TaskUnit:
        resolved = ("token_ids", "positions", "context_lens", "seq_lens", "logits_indices", "hidden")
        return TaskUnit("next", self._inner_rows, tuple(f"step.{n}" for n in resolved))

    def _choose(self, v: Values) -> tuple[()]:
        """Of each sequence, the children of the root become drafts."""
        tree, slots_S = self.tree, v["step.slots"]
        at_S = numbers(slots_S)
        row_S = torch.index_select(v["step.logits_indices"], 0, at_S)
        ranked_SC = torch.index_select(v["drafted"], 0, at_S)
        drafts_SJ = torch.stack([ranked_SC[:, tree.choices[node - 1]] for node in tree.children[0]], -1)
        position_S = torch.index_select(v["step.positions"], 0, row_S)
        record(v, drafts_SJ, position_S, torch.zeros_like(slots_S), self.last)
        store_slots(torch.index_select(v["x"], 0, row_S), slots_S, v["state.draft_hidden"])
        return ()

    def _inner_rows(self, v: Values) -> tuple[Tensor, ...]:
        """The inner nodes of each sequence: their drafts, and the hidden states that the drafts came from. Their
        positions follow the newest token by their depths; in the cache they lie one after the other."""
        tree, last_position = self.tree, self.last
        inner, nodes, sequence_T = tree.inner, v[f"state.{STATE}"], v["step.sequence_ids"].long()
        N, count, K = nodes.shape[0], len(inner), v["state.drafts"].shape[1]
        slot_T = torch.index_select(v["step.slots"], 0, sequence_T).long()
        place_T = numbers(sequence_T) - torch.index_select(v["step.query_start_loc"], 0, sequence_T)
        place_T = place_T.clamp(0, count - 1)  # of padding, too
        draft_T = slot_T * K + _looked_up(place_T, [node - 1 for node in inner])
        token_T = torch.index_select(v["state.drafts"].view(-1), 0, draft_T).clamp(min=0)
        before = [inner.index(parent) if (parent := tree.parents[node]) else -1 for node in inner]
        parent_T = _looked_up(place_T, before)
        at_T = slot_T * count + parent_T.clamp(min=0)
        own_TD = torch.index_select(nodes.view(N * count, -1), 0, at_T)
        root_TD = torch.index_select(v["state.draft_hidden"], 0, slot_T)
        hidden_TD = torch.where((parent_T >= 0)[:, None], own_TD, root_TD)
        first_T = torch.index_select(v["state.draft_position"], 0, slot_T)
        depths = [tree.depths[node] - 1 for node in inner]
        position_T = (first_T + _looked_up(place_T, depths)).clamp(max=last_position).to(torch.int32)
        # Where no room is left for all, known rows are overwritten: nothing is verified there any more.
        end_S = torch.index_select(v["state.draft_position"], 0, v["step.slots"]) + count
        end_S = end_S.clamp(max=last_position + 1)
        row_R = numbers(v["step.logits_indices"]).to(torch.int32)
        return token_T, position_T, position_T + 1, end_S, row_R, hidden_TD

    def choose_next(self, v: Values) -> tuple[()]:
        """The children of each inner node become drafts. The hidden states that they came from are kept for their own
        children."""
        tree = self.tree
        start_S, ranked_RC, slots_S = v["step.query_start_loc"][:-1], v["drafted"], v["step.slots"]
        last = ranked_RC.shape[0] - 1

        def row(node: int) -> Tensor:
            at_S = start_S + tree.inner.index(node)
            return torch.minimum(at_S, at_S.new_full((1,), last))  # of padding, too

        first = len(tree.children[0])
        later = range(first + 1, len(tree.parents))
        drafts_SJ = torch.stack(
            [torch.index_select(ranked_RC[:, tree.choices[n - 1]], 0, row(tree.parents[n])) for n in later], -1
        )
        before_S = torch.index_select(v["state.draft_position"], 0, slots_S) - 1  # which stays
        record(v, drafts_SJ, before_S, torch.zeros_like(slots_S) + first, self.last)
        rows_SD = torch.cat([torch.index_select(v["x"], 0, row(node)) for node in tree.inner], -1)
        store_slots(rows_SD, slots_S, v[f"state.{STATE}"])
        return ()


def numbers(like: Tensor) -> Tensor:
    return torch.arange(like.shape[0], device=like.device)


def _looked_up(place_T: Tensor, values: Sequence[int]) -> Tensor:
    """values[place], as arithmetic: a program has no tensors of constants."""
    found_T = torch.zeros_like(place_T) + values[0]
    for place, value in enumerate(values[1:], 1):
        found_T = torch.where(place_T == place, value, found_T)
    return found_T
