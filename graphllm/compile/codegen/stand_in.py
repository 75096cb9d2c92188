"""The tensor-parallel group while kernels are built: pieces run for that, and no other rank is there to take part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from graphllm.ir.groups import EXPERTS, TENSOR, OneProcess, joined_group, set_group


class FakeGroup(OneProcess):
    """Of so many ranks. What others would give is this process's own, or zeros."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, x: Tensor, work: Tensor, out: Tensor) -> None:
        out.zero_()

    def gather_rows(self, x: Tensor, out: Tensor) -> None:
        out.zero_()

    def sum_rows(self, x: Tensor, work: Tensor, out: Tensor) -> None:
        out.copy_(x[: len(out)])


@contextmanager
def standing_in(ranks: int, cores: int = 1) -> Iterator[None]:
    """Within the context, this single process runs code for ``ranks`` ranks and ``cores`` cores that share experts."""
    sizes = {TENSOR: ranks, EXPERTS: cores}
    before = {name: joined_group(name) for name in sizes}
    for name, size in sizes.items():
        set_group(name, FakeGroup(size) if size > 1 else None)
    try:
        yield
    finally:
        for name, group in before.items():
            set_group(name, group)
