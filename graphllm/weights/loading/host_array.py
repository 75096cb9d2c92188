"""HostArray: numbers in a CPU's memory by their dtype's name. Without torch: importing that takes seconds and 200
MB."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from graphllm.weights.dtypes import ITEMSIZE

# numpy has no such numbers: their bits, in integers of their size.
_BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


class HostArray:
    """Has the few methods of torch's tensors that running compiled kernels takes, by their names. numbers: as numpy
    sees them; of a dtype that it does not have, their bits."""

    __slots__ = ("dtype", "numbers")

    def __init__(self, numbers: np.ndarray, dtype: str) -> None:
        self.numbers, self.dtype = numbers, dtype

    @staticmethod
    def bytes_of(shape: Sequence[int], dtype: str) -> int:
        """That an array takes."""
        return math.prod(shape) * ITEMSIZE[dtype]

    @staticmethod
    def of(memory: np.ndarray, shape: Sequence[int], dtype: str) -> HostArray:
        """The first bytes of contiguous memory in one dimension as an array."""
        used = memory.view(np.uint8)[: HostArray.bytes_of(shape, dtype)]
        return HostArray(used.view(_BITS.get(dtype, dtype)).reshape(tuple(shape)), dtype)

    @staticmethod
    def zeros(shape: Sequence[int], dtype: str) -> HostArray:
        """In memory of malloc's."""
        return HostArray.of(np.zeros(HostArray.bytes_of(shape, dtype), np.uint8), shape, dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes

    def data_ptr(self) -> int:
        return self.numbers.ctypes.data

    def element_size(self) -> int:
        return self.numbers.itemsize

    def numel(self) -> int:
        return self.numbers.size

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> HostArray:
        """A view, as of slices and whole numbers."""
        return HostArray(np.asarray(self.numbers[index]), self.dtype)

    def typed(self, dtype: str) -> HostArray:
        """The bytes of an array in one dimension as numbers of another dtype."""
        return HostArray(self.numbers.view(_BITS.get(dtype, dtype)), dtype)

    def strided(self, shape: Sequence[int], stride: Sequence[int], offset: int) -> HostArray:
        """A view of another shape and stride. offset: numbers before its first one. All of it must be there."""
        if 0 in shape:
            return HostArray(np.empty(tuple(shape), self.numbers.dtype), self.dtype)
        size = self.element_size()
        whole = np.lib.stride_tricks.as_strided(self.numbers, (self._reach(shape, stride, offset),), (size,))
        steps = tuple(size * n for n in stride)
        return HostArray(np.lib.stride_tricks.as_strided(whole[offset:], tuple(shape), steps), self.dtype)

    @staticmethod
    def _reach(shape: Sequence[int], stride: Sequence[int], offset: int) -> int:
        return offset + 1 + sum((n - 1) * by for n, by in zip(shape, stride, strict=True))

    def numpy(self) -> np.ndarray:
        """The same memory."""
        return self.numbers

    def cpu(self) -> HostArray:
        """It is there."""
        return self

    def copy_(self, source: HostArray | np.ndarray, non_blocking: bool = False) -> None:
        """Take over what another one holds, of the same dtype, or bfloat16 as float32; done when this returns."""
        if isinstance(source, HostArray):
            source = source.floats() if source.dtype == "bfloat16" != self.dtype else source.numbers
        self.numbers[...] = source

    def zero_(self) -> None:
        """Make all of it zero."""
        self.numbers[...] = 0

    def floats(self) -> np.ndarray:
        """Floating numbers as float32, a copy."""
        if self.dtype == "bfloat16":
            return (self.numbers.astype(np.uint32) << 16).view(np.float32)
        return self.numbers.astype(np.float32)


def bfloat16_bits(numbers: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16, to the nearest, ties to even; the bits, uint16."""
    bits = numbers.view(np.uint32)
    rounded = ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)
    rounded[np.isnan(numbers)] = 0x7FC0
    return rounded
