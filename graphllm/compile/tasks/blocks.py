"""Drafting a block at once (`Graph.context`): masks follow the token that was sampled last, all in one run.

The first run is over the step's tokens: from their hidden states each layer makes what it keeps of them, and nothing
else is computed. The next run has, of each sequence, a row for the token that follows and a row for each draft. What
this run keeps lies after the kept tokens, where the next step's first run writes: nothing is to be rolled back.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from graphllm.compile.tasks.draft_rows import next_token, step_rows
from graphllm.compile.tasks.drafting import Drafting, filled, named, record
from graphllm.compile.tasks.task import ProgramUnits, TaskUnit, Values
from graphllm.config.token_tree import TokenTree
from graphllm.ir.model import Drafts
from graphllm.ops.rows.store_slots import store_slots
from graphllm.program.program import DraftReach

_RUN = tuple(f"step.{n}" for n in ("token_ids", "positions", "context_lens", "seq_lens"))


class Block(Drafting):
    """One further run makes all drafts."""

    @property
    def num_drafts(self) -> int:
        """Drafts of a block, one after the other."""
        return self.config.num_speculative_tokens if self.config.tree is None else self.config.tree.levels

    @property
    def lookahead(self) -> int:
        return self.num_drafts + 1 if self.keeps else 0

    @property
    def rows(self) -> int:
        return self.num_drafts + 1

    def reach(self) -> DraftReach:
        return DraftReach(self.lookahead, at_once=self.graph.drafts_at_once(self.c), block=self.lookahead)

    def first(self) -> TaskUnit:
        return TaskUnit("first", self._context_rows, (*_RUN, "step.hidden"))

    def programs(self) -> Mapping[str, ProgramUnits]:
        resolved = (*_RUN, "step.logits_indices", "step.places", "step.block_bits")
        count, mask_token = self.num_drafts, self.graph.mask_token(self.c)
        before = TaskUnit("next", lambda v: _block_rows(v, count, mask_token, self.last), resolved)
        return {
            "first": ProgramUnits(self.before_first(), own=("embed", "context")),
            "next": ProgramUnits((before,), (self.choose(),)),
        }

    def chosen(self, made: Drafts, v: Values) -> Tensor:
        tree, count = self.config.tree, self.num_drafts
        if tree is None and not self.draws:
            tokens_R = made.logits[0].argmax(-1)
            return named(tokens_R.view(count, tokens_R.shape[0] // count).t(), made.ids)
        # Logits [N * S, V], the first draft of all sequences first, as [S, V] of each draft.
        logits_RV = made.logits[0]
        parts = logits_RV.view(count, logits_RV.shape[0] // count, logits_RV.shape[1])
        made = made._replace(logits=tuple(parts.unbind(0)))
        if tree is None:
            return super().chosen(made, v)
        assert isinstance(tree, TokenTree)  # `TreeVerification.check_drafter`
        return named(filled(made, tree), made.ids)

    def first_position(self, v: Values) -> Tensor:
        return _next_position(v)

    def _context_rows(self, v: Values) -> tuple[Tensor, ...]:
        """The tokens of the step. The position after the last kept token of each sequence is noted."""
        rows = step_rows(v, self._hidden_states(), self.verification)
        store_slots(torch.index_select(rows.positions, 0, rows.last) + 1, v["step.slots"], v["state.draft_position"])
        token_T = torch.index_select(v["state.step_ids"], 0, rows.source).clamp(min=0)
        return token_T, rows.positions, rows.positions + 1, rows.ends, rows.hidden

    def _choose(self, v: Values) -> tuple[()]:
        before_S = _next_position(v) - 1  # the state stays
        record(v, v["drafted"], before_S, v["step.places"], self.last)
        return ()


def _next_position(v: Values) -> Tensor:
    """[S]: the position of the token that a block begins with."""
    return torch.index_select(v["state.draft_position"], 0, v["step.slots"])


def _block_rows(v: Values, count: int, mask_token: int, last_position: int) -> tuple[Tensor, ...]:
    """Of each sequence the token that follows the last kept one, then masks."""
    sequence_T, start_S = v["step.sequence_ids"], v["step.query_start_loc"][:-1]
    at_T = torch.arange(sequence_T.shape[0], device=sequence_T.device)
    place_T = (at_T - torch.index_select(start_S, 0, sequence_T)).clamp(0, count).to(torch.int32)
    begin_S = _next_position(v)
    begin_T, token_T = (torch.index_select(t, 0, sequence_T) for t in (begin_S, next_token(v)))
    token_T = torch.where(place_T == 0, token_T, mask_token).clamp(min=0)
    position_T = (begin_T + place_T).clamp(max=last_position)
    # Where no room is left for all, known rows are overwritten: nothing is verified there any more.
    end_S = (begin_S + count + 1).clamp(max=last_position + 1)
    drafts_N = torch.arange(1, count + 1, device=at_T.device, dtype=torch.int32)
    row_R = (start_S[None, :] + drafts_N[:, None]).flatten()
    row_R = torch.minimum(row_R, row_R.new_full((1,), at_T.shape[0] - 1))  # of padding, too
    bits_T = torch.zeros_like(position_T, dtype=torch.int64) + ((1 << count + 1) - 1)
    return token_T, position_T, position_T + 1, end_S, row_R, torch.zeros_like(begin_S), bits_T
