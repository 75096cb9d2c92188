"""Where the rows of a draft graph's first run come from: the kept tokens of a step, and the hidden states that the main
graph has left of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphllm.compile.tasks.task import Values
from graphllm.compile.tasks.verification import Verification
from graphllm.ir.model import Hidden


class StepRows(NamedTuple):
    """The rows of a first run.

    source [T]: the step's row of each token.
    following [T]: the step's row of the token that follows each one.
    last [S]: the row of each sequence's last kept token.
    positions [T]: of the tokens.
    ends [S]: tokens of each sequence with all tokens of the step.
    hidden [T, D]: hidden states of the tokens.
    """

    source: Tensor
    following: Tensor
    last: Tensor
    positions: Tensor
    ends: Tensor
    hidden: Tensor


def hidden_states(hidden: Hidden) -> list[str]:
    """The states in which the main graph leaves the hidden states of each layer that is read."""
    return [f"step_hidden_{i}" for i in range(len(hidden.layers))]


def step_rows(v: Values, hidden: list[str], verification: Verification) -> StepRows:
    """The tokens of the step. hidden: see `hidden_states`."""
    count_T = v["step.sequence_ids"].shape[0]
    from_T, next_T, last_S = verification.along_path(v)
    position_T = torch.index_select(v["state.step_positions"], 0, from_T)
    # Sequences have the lengths of the whole step: attention finds the rows' positions by them.
    start_S, count_S = v["step.query_start_loc"][:-1], v["step.query_start_loc"][1:] - v["step.query_start_loc"][:-1]
    end_S = torch.index_select(position_T, 0, start_S.clamp(max=count_T - 1)) + count_S
    hidden_TD = torch.cat([torch.index_select(v[f"state.{n}"], 0, from_T) for n in hidden], -1)
    return StepRows(from_T, next_T, last_S, position_T, end_S, hidden_TD)


def next_token(v: Values) -> Tensor:
    """[S]: the token that follows the last kept one of each sequence."""
    sampled_S = torch.index_select(v["state.last_token"], 0, v["step.slots"])
    return torch.where(v["step.next_tokens"] >= 0, v["step.next_tokens"], sampled_S)
