"""Where the rows of a draft graph's first run come from: the tokens of a step, as far as they are kept, and the hidden
states that the main graph has left of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphllm.compile.tasks import trees
from graphllm.compile.tasks.sampling import Values
from graphllm.config.token_tree import DynamicTree, TokenTree
from graphllm.ir.model import Hidden


class StepRows(NamedTuple):
    """Rows of the step that a draft graph's first run reads.

    source [T]: the step's row of each token.
    behind [T]: the step's row of the next token.
    last [S]: row of each sequence's last kept token.
    positions [T], hidden [T, D]: of the tokens.
    ends [S]: tokens of the sequences with all of the step's.
    """

    source: Tensor
    behind: Tensor
    last: Tensor
    positions: Tensor
    ends: Tensor
    hidden: Tensor


def hidden_states(hidden: Hidden) -> list[str]:
    """The states in which the main graph leaves the hidden states of each layer that is read."""
    return [f"step_hidden_{i}" for i in range(len(hidden.layers))]


def step_rows(v: Values, hidden: list[str], tree: TokenTree | DynamicTree | None) -> StepRows:
    """The tokens of the step; of a tree, the tokens of the kept path come first. hidden: see `hidden_states`."""
    count_T = v["step.sequence_ids"].shape[0]
    at_T = torch.arange(count_T, device=v["step.sequence_ids"].device)
    if tree is None:
        from_T, next_T = at_T, (at_T + 1).clamp(max=count_T - 1)
        last_S = (v["step.query_start_loc"][1:] - 1 - rejected(v)).clamp(min=0)
    else:
        from_T, next_T, last_S = trees.along_path(v, tree)
    position_T = torch.index_select(v["state.step_positions"], 0, from_T)
    # Sequence lengths include the whole step: attention finds the rows' positions by them.
    start_S, count_S = v["step.query_start_loc"][:-1], v["step.query_start_loc"][1:] - v["step.query_start_loc"][:-1]
    end_S = torch.index_select(position_T, 0, start_S.clamp(max=count_T - 1)) + count_S
    hidden_TD = torch.cat([torch.index_select(v[f"state.{n}"], 0, from_T) for n in hidden], -1)
    return StepRows(from_T, next_T, last_S, position_T, end_S, hidden_TD)


def rejected(v: Values) -> Tensor:
    """[S]: tokens of the step that each sequence has not kept."""
    return torch.index_select(v["state.rejected"], 0, v["step.slots"])


def behind_last(v: Values) -> Tensor:
    """[S]: the token after the last kept token of each sequence."""
    sampled_S = torch.index_select(v["state.last_token"], 0, v["step.slots"])
    return torch.where(v["step.next_tokens"] >= 0, v["step.next_tokens"], sampled_S)
