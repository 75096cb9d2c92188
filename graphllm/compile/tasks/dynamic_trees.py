"""Drafting a dynamic tree (`DynamicTree`), which grows where a draft graph is sure: EAGLE-2's.

A draft's score is the sum of the log-probabilities on the path to it. After the root, and after the best drafts of each
depth but the last, the likeliest tokens are candidates; the best of all candidates are verified. As with given trees,
each run of the draft graph but the first is over all drafts that have children, so that each run is right about one
depth more. Where the nodes stand is data: programs are the same for all trees of a size, and the host learns nothing.

Candidates are numbered: the children of the root, then the children of each row of a further run; rows by depth, then
by score. Source: Li et al. 2024, EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.compile.tasks.drafting import record
from graphllm.compile.tasks.task import TaskUnit, Values
from graphllm.compile.tasks.trees import STATE, ByLevels, numbers
from graphllm.compile.tasks.verified_trees import NODE_STATES
from graphllm.config.token_tree import DynamicTree
from graphllm.ir.model import Drafts
from graphllm.ops.rows.store_slots import store_slots
from graphllm.ops.sampling.token_logprobs import token_logprobs
from graphllm.program.specs import StateSpec


class DynamicLevels(ByLevels):
    """A tree that has only its sizes in the artifact."""

    @property
    def tree(self) -> DynamicTree:
        assert isinstance(self.config.tree, DynamicTree)
        return self.config.tree

    def further_states(self) -> tuple[StateSpec, ...]:
        """grown_*: of each sequence, between runs: tokens and scores of the candidates, and which ones the rows are."""
        tree = self.tree
        return (
            *super().further_states(),
            StateSpec("grown_tokens", "slot", (tree.candidates,), "int32", "none"),
            StateSpec("grown_scores", "slot", (tree.candidates,), "float32", "none"),
            StateSpec("grown_rows", "slot", (max(tree.rows, 1),), "int32", "none"),
        )

    def inner(self) -> TaskUnit:
        resolved = ("token_ids", "positions", "context_lens", "seq_lens", "logits_indices", "hidden", "ancestors")
        return TaskUnit("next", self._rows, tuple(f"step.{n}" for n in resolved))

    def chosen(self, made: Drafts, v: Values) -> Tensor:
        """[R, 2 * top_k] float32: log-probabilities of each row's likeliest tokens, largest first, and these tokens."""
        logits_RV, k = made.logits[0], self.tree.top_k
        none_R = torch.zeros(logits_RV.shape[0], dtype=torch.int32, device=logits_RV.device)
        found_RX = token_logprobs(logits_RV, none_R, none_R - 1, none_R, k)
        tokens_Rk = found_RX[:, 2 + k :].long()
        if made.ids is not None:
            tokens_Rk = torch.index_select(made.ids, 0, tokens_Rk.flatten()).view(tokens_Rk.shape)
        # Of a token that is nearly certain it may be rounded to more than 0, and a draft outdo the one before it.
        return torch.cat([found_RX[:, 2 : 2 + k].float().clamp(max=0), tokens_Rk.float()], -1)

    def _choose(self, v: Values) -> tuple[()]:
        """The children of the root become candidates, and the first rows."""
        tree, slots_S, k = self.tree, v["step.slots"], self.tree.top_k
        at_S = numbers(slots_S)
        row_S = torch.index_select(v["step.logits_indices"], 0, at_S)
        made_SX = torch.index_select(v["drafted"], 0, at_S)
        rest_SC = made_SX.new_zeros(made_SX.shape[0], tree.candidates - k)
        scores_SC = torch.cat([made_SX[:, :k], rest_SC - float("inf")], -1)
        tokens_SC = torch.cat([made_SX[:, k:], rest_SC], -1).to(torch.int32)
        first_F = torch.arange(max(tree.rows, 1), device=slots_S.device, dtype=torch.int32) % k
        rows_SF = torch.zeros_like(slots_S)[:, None] + first_F
        position_S = torch.index_select(v["step.positions"], 0, row_S)
        _keep(v, tree, tokens_SC, scores_SC, rows_SF, rows_SF, position_S, self.last)
        store_slots(torch.index_select(v["x"], 0, row_S), slots_S, v["state.draft_hidden"])
        return ()

    def _rows(self, v: Values) -> tuple[Tensor, ...]:
        """The drafts that have children, with the hidden states that they came from, and the ancestors of each."""
        tree, last_position = self.tree, self.last
        F, k, nodes, sequence_T = tree.rows, tree.top_k, v[f"state.{STATE}"], v["step.sequence_ids"].long()
        N, at_T = nodes.shape[0], numbers(sequence_T)
        slot_T = torch.index_select(v["step.slots"], 0, sequence_T).long()
        start_T = torch.index_select(v["step.query_start_loc"], 0, sequence_T).long()
        place_T = (at_T - start_T).clamp(0, F - 1)  # of padding, too
        number_T = torch.index_select(v["state.grown_rows"].view(-1), 0, slot_T * F + place_T)
        number_T = number_T.long().clamp(0, tree.candidates - 1)
        token_T = torch.index_select(v["state.grown_tokens"].view(-1), 0, slot_T * tree.candidates + number_T).clamp(
            min=0
        )
        before_T = (number_T - k).clamp(min=0) // k  # row of the draft before
        has_before_T = place_T >= k
        own_TD = torch.index_select(nodes.view(N * F, -1), 0, slot_T * F + before_T.clamp(max=F - 1))
        root_TD = torch.index_select(v["state.draft_hidden"], 0, slot_T)
        hidden_TD = torch.where(has_before_T[:, None], own_TD, root_TD)
        depth_T = (place_T // k).to(torch.int32)
        position_T = (torch.index_select(v["state.draft_position"], 0, slot_T) + depth_T).clamp(max=last_position)
        to_T = torch.where(has_before_T, start_T + before_T, at_T)
        to_T = torch.minimum(to_T, to_T.new_full((1,), at_T.shape[0] - 1))
        bits_T = torch.ones_like(place_T) << place_T
        for _ in range((tree.levels - 2).bit_length()):  # each time those twice as far
            bits_T, to_T = bits_T | torch.index_select(bits_T, 0, to_T), torch.index_select(to_T, 0, to_T)
        # Where no room is left for all, known rows are overwritten: nothing is verified there any more.
        end_S = torch.index_select(v["state.draft_position"], 0, v["step.slots"]) + F
        row_R = numbers(v["step.logits_indices"]).to(torch.int32)
        return token_T, position_T, position_T + 1, end_S.clamp(max=last_position + 1), row_R, hidden_TD, bits_T

    def choose_next(self, v: Values) -> tuple[()]:
        """The children of each row become candidates, and the best of each depth the rows of the next depth."""
        tree = self.tree
        F, k, L, slots_S = tree.rows, tree.top_k, tree.levels, v["step.slots"]
        made_RX, start_S = v["drafted"], v["step.query_start_loc"][:-1].long()
        row_SF = start_S[:, None] + torch.arange(F, device=slots_S.device)
        row_SF = torch.minimum(row_SF, row_SF.new_full((1,), made_RX.shape[0] - 1))  # of padding, too
        made_SFX = torch.index_select(made_RX, 0, row_SF.flatten()).view(slots_S.shape[0], F, 2 * k)
        tokens_SC, scores_SC, rows_SF = (
            torch.index_select(v[f"state.grown_{n}"], 0, slots_S) for n in ("tokens", "scores", "rows")
        )
        # From depth to depth, of this run's scores only: those of the run before may be rounded otherwise, and a draft
        # would outdo the one before it.
        scores_SC = scores_SC[:, :k]
        for depth in range(L - 1):
            rows = slice(depth * k, (depth + 1) * k)
            behind_Sk = torch.gather(scores_SC, 1, rows_SF[:, rows].long().clamp(0, scores_SC.shape[1] - 1))
            scores_SC = torch.cat([scores_SC, (behind_Sk[:, :, None] + made_SFX[:, rows, :k]).flatten(1)], -1)
        found_SC = scores_SC[:, k:]
        tokens_SC = torch.cat([tokens_SC[:, :k], made_SFX[:, :, k:].flatten(1).to(torch.int32)], -1)
        next_SF = rows_SF
        if L > 2:  # of all depths at once; each run makes one depth more right
            of_depth_SLC = found_SC[:, : (L - 2) * k * k].view(slots_S.shape[0], L - 2, k * k)
            number_SLk = _with_ranks(_ranks(of_depth_SLC), k)
            first_L = k + k * k * torch.arange(L - 2, device=slots_S.device)
            next_SF = torch.cat([rows_SF[:, :k], (number_SLk + first_L[:, None]).flatten(1).to(torch.int32)], -1)
        before_S = torch.index_select(v["state.draft_position"], 0, slots_S) - 1  # which stays
        _keep(v, tree, tokens_SC, scores_SC, rows_SF, next_SF, before_S, self.last)
        hidden_RD = torch.index_select(v["x"], 0, row_SF.flatten()).view(slots_S.shape[0], F * v["x"].shape[1])
        store_slots(hidden_RD, slots_S, v[f"state.{STATE}"])
        return ()


def _keep(
    v: Values, tree: DynamicTree, tokens_SC: Tensor, scores_SC: Tensor, rows_SF: Tensor, next_SF: Tensor,
    position_S: Tensor, last_position: int,
) -> None:  # fmt: skip
    """The best of the candidates become the drafts. rows_SF: which of them the rows of this run were; next_SF: are from
    now on."""
    slots_S, k, C, F = v["step.slots"], tree.top_k, tree.candidates, rows_SF.shape[1]
    candidate_C = torch.arange(C, device=slots_S.device)
    chosen_SC = _ranks(scores_SC) < tree.drafts
    place_SC = (chosen_SC[:, None, :] & (candidate_C < candidate_C[:, None])).sum(-1)  # in the order of their numbers
    number_SN = _with_ranks(torch.where(chosen_SC, place_SC, C), tree.drafts)
    drafts_SN = torch.gather(tokens_SC, 1, number_SN)
    record(v, drafts_SN, position_S, torch.zeros_like(slots_S), last_position)
    # A path's scores fall, and of equals the first comes first: what is chosen has all that is before it.
    row_SN = (number_SN - k).clamp(min=0) // k
    row_SN = row_SN.clamp(max=F - 1)
    before_SN = torch.gather(rows_SF.long().clamp(0, C - 1), 1, row_SN)
    node_N = torch.arange(1, tree.nodes, device=slots_S.device)
    parent_SN = torch.where(number_SN < k, 0, torch.minimum(torch.gather(place_SC, 1, before_SN) + 1, node_N - 1))
    depth_SN = torch.where(number_SN < k, 1, row_SN // k + 2)
    root_S1 = torch.zeros_like(slots_S)[:, None]
    parents_SM, depths_SM = (torch.cat([root_S1, t.to(torch.int32)], -1) for t in (parent_SN, depth_SN))
    to_SM = parents_SM.long()
    node_M = torch.arange(tree.nodes, device=slots_S.device)
    bits_SM = torch.zeros_like(to_SM) + (torch.ones_like(node_M) << node_M)
    for _ in range(tree.levels.bit_length()):  # each time ancestors twice as far
        bits_SM, to_SM = bits_SM | torch.gather(bits_SM, 1, to_SM), torch.gather(to_SM, 1, to_SM)
    kept = dict(zip(NODE_STATES, (parents_SM, bits_SM, depths_SM), strict=True))
    kept |= {"grown_tokens": tokens_SC, "grown_scores": scores_SC, "grown_rows": next_SF}
    for name, rows in kept.items():
        store_slots(rows, slots_S, v[f"state.{name}"])


def _ranks(scores: Tensor) -> Tensor:
    """[..., C]: how many come before each in the order of scores, of equals those before it."""
    n = torch.arange(scores.shape[-1], device=scores.device)
    other, own = scores[..., None, :], scores[..., :, None]
    return ((other > own) | ((other == own) & (n < n[:, None]))).sum(-1)


def _with_ranks(ranks: Tensor, count: int) -> Tensor:
    """[..., count]: which one has each of the first ranks."""
    n = torch.arange(ranks.shape[-1], device=ranks.device)
    is_it = ranks[..., None, :] == torch.arange(count, device=ranks.device)[:, None]
    return torch.where(is_it, n, 0).sum(-1).clamp(max=ranks.shape[-1] - 1)
