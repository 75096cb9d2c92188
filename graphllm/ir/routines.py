"""graphllm's own extern routines, by name: what an artifact calls that a library computes."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from graphllm.ir.groups import group_of, links_of


def scaled_product(codes: Tensor, row_scales: Tensor, weight: Tensor, scales: Tensor, out: Tensor) -> None:
    """Rows times weights, both float8 in pairs; see the op scaled_linear."""
    rows, columns = (t.view(torch.float8_e4m3fn) for t in (codes, weight))
    torch._scaled_mm(
        rows, columns.t(), scale_a=row_scales, scale_b=scales, out_dtype=out.dtype, use_fast_accum=True, out=out
    )


def all_reduce_into(x: Tensor, out: Tensor, group: str, ranks: int) -> None:
    """The sum over the ranks of a group; see the op all_reduce."""
    group_of(group, ranks).all_reduce(x, out)


def send_to_stage(stages: int, to: int, *values: Tensor) -> None:
    """Give values to another one of the ``stages`` stages, which calls `receive_from_stage`."""
    links_of(stages).send(values, [to])


def send_to_stages(stages: int, origin: int, *values: Tensor) -> None:
    """Give values to all other stages; this one is ``origin``."""
    links_of(stages).send(values, [stage for stage in range(stages) if stage != origin])


def receive_from_stage(stages: int, origin: int, *values: Tensor) -> None:
    """Take what another stage gives by `send_to_stage` or `send_to_stages`."""
    links_of(stages).receive(values, origin)


def gather_rows_into(x: Tensor, out: Tensor, group: str, ranks: int) -> None:
    """All rows of x of the ranks of a group, one below the other."""
    group_of(group, ranks).gather_rows(x, out)


def sum_rows_into(x: Tensor, work: Tensor, out: Tensor, group: str, ranks: int) -> None:
    """This rank's rows of the sum of x over a group."""
    group_of(group, ranks).sum_rows(x, work, out)


def all_gather_into(x: Tensor, work: Tensor, out: Tensor, group: str, ranks: int) -> None:
    """What all ranks of a group have, side by side; see the op all_gather."""
    group_of(group, ranks).all_gather(x, work, out)


class Offloaded(Protocol):
    """Weights in the host's memory, by groups; see `graphllm.program.offloading`."""

    def begin(self, group: int) -> None:
        """Copy a group to the device, once what was launched so far has ended."""

    def wait(self, group: int) -> None:
        """Have what is launched from here on wait for that copy."""


def begin_weights_copy(weights: Offloaded, group: int) -> None:
    """Begin to copy a group of weights to the device."""
    weights.begin(group)


def await_weights_copy(weights: Offloaded, group: int) -> None:
    """Have what follows wait for a group of weights."""
    weights.wait(group)
