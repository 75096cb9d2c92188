"""A device's memory as arrays: tensors of torch, or on a CPU that needs no torch `HostArray`s.

Whatever binds programs to addresses asks a `Memory` for arrays and views of them. Importing this imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from graphllm.host.hugepages import zeros
from graphllm.weights.loading.host_array import HostArray

Array = Any
"""A `torch.Tensor` or a `HostArray`: both have shape, nbytes, data_ptr(), element_size(), numel(), numpy(), copy_(),
zero_() and take indices."""


class Memory(Protocol):
    """device: its ``type`` is "cpu" or "cuda"."""

    @property
    def device(self) -> Any: ...

    def zeros(self, shape: Sequence[int], dtype: str) -> Array:
        """Zeros; on a CPU in memory that is given at its first use."""

    def scratch(self, nbytes: int) -> Array:
        """Bytes for what kernels hand on within a step, zeros at first."""

    def staging(self, nbytes: int, on_host: bool) -> Array:
        """A few bytes of zeros, on the device or where the host writes what goes there."""

    def wrapped(self, memory: np.ndarray) -> Array:
        """Host memory as an array, where it lies."""

    def typed(self, array: Array, dtype: str) -> Array:
        """The bytes of an array in one dimension as numbers of another dtype."""

    def shaped(self, array: Array, dtype: str, shape: Sequence[int]) -> Array:
        """The same in that shape."""

    def strided(self, array: Array, shape: Sequence[int], stride: Sequence[int], offset: int) -> Array:
        """A view with another geometry. offset: numbers from the array's first to the view's first."""

    def on_host(self, array: Array) -> np.ndarray | None:
        """The array itself, where the host can read it as numbers of numpy's."""

    def read_into(self, array: Array, shape: Sequence[int]) -> Array:
        """Zeros on the host, of numbers as numpy has them, into which arrays like this one are copied."""

    def log_softmax(self, logits: Array) -> Callable[[], np.ndarray]:
        """What reads the log-probabilities of a row of logits; NaN counts as minus infinity."""


class _Cpu:
    type = "cpu"


class HostMemory:
    """Memory of a CPU, for programs that consist of compiled kernels only."""

    device = _Cpu()

    def zeros(self, shape: Sequence[int], dtype: str) -> HostArray:
        return HostArray.of(zeros(max(1, HostArray.bytes_of(shape, dtype))), shape, dtype)

    def scratch(self, nbytes: int) -> HostArray:
        return self.zeros((nbytes,), "uint8")

    def staging(self, nbytes: int, on_host: bool) -> HostArray:
        return HostArray.zeros((nbytes,), "uint8")

    def wrapped(self, memory: np.ndarray) -> HostArray:
        return HostArray(memory, str(memory.dtype))

    def typed(self, array: HostArray, dtype: str) -> HostArray:
        return array.typed(dtype)

    def shaped(self, array: HostArray, dtype: str, shape: Sequence[int]) -> HostArray:
        return HostArray.of(array.numbers.reshape(-1), shape, dtype)

    def strided(self, array: HostArray, shape: Sequence[int], stride: Sequence[int], offset: int) -> HostArray:
        return array.strided(shape, stride, offset)

    def on_host(self, array: HostArray) -> np.ndarray | None:
        return None if array.dtype == "bfloat16" else array.numpy()

    def read_into(self, array: HostArray, shape: Sequence[int]) -> HostArray:
        return HostArray.zeros(shape, "float32" if array.dtype == "bfloat16" else array.dtype)

    def log_softmax(self, logits: HostArray) -> Callable[[], np.ndarray]:
        numbers = np.nan_to_num(logits.floats(), nan=-np.inf, posinf=np.inf, neginf=-np.inf)
        below = numbers - numbers.max()
        found = below - np.log(np.exp(below).sum(dtype=np.float64)).astype(np.float32)
        return lambda: found
