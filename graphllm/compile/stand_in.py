"""The tensor-parallel group while kernels are built: pieces run for that, and no other rank is there to take part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from graphllm.ir.groups import TENSOR, Alone, joined_group, set_group


class StandIn(Alone):
    """Of so many ranks. What others would give is this process's own, or zeros."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, x: Tensor, work: Tensor, out: Tensor) -> None:
        out.zero_()


@contextmanager
def standing_in(ranks: int) -> Iterator[None]:
    """Run what is made for so many ranks in this process alone."""
    before = joined_group(TENSOR)
    set_group(TENSOR, StandIn(ranks) if ranks > 1 else None)
    try:
        yield
    finally:
        set_group(TENSOR, before)
