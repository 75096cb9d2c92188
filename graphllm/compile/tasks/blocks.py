"""Draft graphs that guess a block at once (`Graph.context`): masks after the token last sampled, in one run.

The first run is over the step's tokens: from their hidden states each layer makes what it keeps of them, and nothing
else is computed. The next one has, of each sequence, a row for the token after them and one for each draft. What that
run keeps lies after the kept tokens, where the next step's first run writes: nothing is to be rolled back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.compile.tasks import trees
from graphllm.compile.tasks.draft_rows import behind_last, step_rows
from graphllm.compile.tasks.sampling import Stage, Values
from graphllm.config import CompileConfig
from graphllm.config.token_tree import DynamicTree, TokenTree
from graphllm.ir.model import Drafts
from graphllm.ops.rows.store_slots import store_slots

_RUN = tuple(f"step.{n}" for n in ("token_ids", "positions", "context_lens", "seq_lens"))


def num_drafts(config: CompileConfig) -> int:
    """Drafts of a block, one after the other."""
    return config.num_speculative_tokens if config.tree is None else config.tree.levels


def context_rows(hidden: list[str], tree: TokenTree | DynamicTree | None) -> Stage:
    """What comes before the graph's own units in the first run. hidden: the states that hold what it reads."""
    return Stage("first", lambda v: _context_rows(v, hidden, tree), (*_RUN, "step.hidden"))


def block(config: CompileConfig, mask_token: int) -> tuple[Stage, Stage]:
    """The stages before the graph's own units in the run over a block, and after its head."""
    resolved = (*_RUN, "step.logits_indices", "step.places", "step.block_bits")
    count, last = num_drafts(config), config.max_model_len - 1
    return (
        Stage("next", lambda v: _block_rows(v, count, mask_token, last), resolved),
        Stage("choose", lambda v: _choose(v, last), ()),
    )


def of_each_draft(made: Drafts, config: CompileConfig) -> Drafts:
    """Logits [N * S, V] of a block's drafts, the first draft of all sequences first, as [S, V] of each draft."""
    logits_RV, count = made.logits[0], num_drafts(config)
    parts = logits_RV.view(count, logits_RV.shape[0] // count, logits_RV.shape[1])
    return made._replace(logits=tuple(parts.unbind(0)))


def likeliest(made: Drafts, config: CompileConfig) -> Tensor:
    """[S, N]: the likeliest tokens."""
    tokens_R, count = made.logits[0].argmax(-1), num_drafts(config)
    return tokens_R.view(count, tokens_R.shape[0] // count).t()


def position_behind(v: Values) -> Tensor:
    """[S]: where the token that a block begins with stands."""
    return torch.index_select(v["state.draft_position"], 0, v["step.slots"])


def _context_rows(v: Values, hidden: list[str], tree: TokenTree | DynamicTree | None) -> tuple[Tensor, ...]:
    """The tokens of the step. Records the position after the last kept token of each sequence."""
    rows = step_rows(v, hidden, tree)
    store_slots(torch.index_select(rows.positions, 0, rows.last) + 1, v["step.slots"], v["state.draft_position"])
    token_T = torch.index_select(v["state.step_ids"], 0, rows.source).clamp(min=0)
    return token_T, rows.positions, rows.positions + 1, rows.ends, rows.hidden


def _block_rows(v: Values, count: int, mask_token: int, last_position: int) -> tuple[Tensor, ...]:
    """Of each sequence the token after the last kept one, then masks."""
    sequence_T, start_S = v["step.sequence_ids"], v["step.query_start_loc"][:-1]
    at_T = torch.arange(sequence_T.shape[0], device=sequence_T.device)
    place_T = (at_T - torch.index_select(start_S, 0, sequence_T)).clamp(0, count).to(torch.int32)
    begin_S = position_behind(v)
    begin_T, token_T = (torch.index_select(t, 0, sequence_T) for t in (begin_S, behind_last(v)))
    token_T = torch.where(place_T == 0, token_T, mask_token).clamp(min=0)
    position_T = (begin_T + place_T).clamp(max=last_position)
    # Where no room is left for all, known rows are overwritten: nothing is verified there any more.
    end_S = (begin_S + count + 1).clamp(max=last_position + 1)
    drafts_N = torch.arange(1, count + 1, device=at_T.device, dtype=torch.int32)
    row_R = (start_S[None, :] + drafts_N[:, None]).flatten()
    row_R = torch.minimum(row_R, row_R.new_full((1,), at_T.shape[0] - 1))  # of padding, too
    bits_T = torch.zeros_like(position_T, dtype=torch.int64) + ((1 << count + 1) - 1)
    return token_T, position_T, position_T + 1, end_S, row_R, torch.zeros_like(begin_S), bits_T


def _choose(v: Values, last_position: int) -> tuple[()]:
    """The tokens of each sequence become its drafts."""
    before_S = position_behind(v) - 1  # the state stays
    trees.record(v, v["drafted"], before_S, v["step.places"], last_position)
    return ()
