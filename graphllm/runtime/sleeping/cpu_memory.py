"""A CPU's memory while an engine sleeps: pages go back to the operating system, and come again under their addresses.

Weights of level 1 stay where they are, which is the host's memory. Only weights that are a mapped file leave the
process: the system keeps the file, and has its pages again at once. The cache, and what steps have between their
kernels, have nothing that is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from graphllm.config import ConfigError
from graphllm.host.hugepages import give_back
from graphllm.host.machine import available_memory
from graphllm.runtime.memory.memory import Array
from graphllm.runtime.memory.states import States
from graphllm.runtime.sleeping.rank_sleep import CACHE, DROPPED


class CpuSleepMemory:
    """See `SleepMemory`.

    weights: the parameters.
    states: the cache is in them.
    scratch: memory of intermediates, as of now.
    is_file: the parameters are a mapped file.
    """

    def __init__(
        self, weights: Iterable[Array], states: States, scratch: Callable[[], Array], is_file: bool = False
    ) -> None:
        self._weights = list(_places(weights))
        self._states, self._scratch, self._is_file = states, scratch, is_file

    def save(self, level: int) -> None:
        """Nothing: the numbers lie in the host's memory."""

    def unmap(self, tag: str, level: int) -> None:
        if tag == CACHE:
            self._states.hold(True)
            for start, nbytes in _places([*self._states.memories, self._scratch()]):
                give_back(start, nbytes)
        elif level == DROPPED or self._is_file:
            for start, nbytes in self._weights:
                give_back(start, nbytes)

    def map(self, tag: str) -> None:
        if tag == CACHE:
            self._states.hold(False)
        elif not self._is_file:
            needed, left = sum(nbytes for _, nbytes in self._weights), available_memory()
            if needed > left:
                raise ConfigError(
                    f"memory: the weights take {needed / 1e9:.1f} GB, there are {left / 1e9:.1f} GB left; free some"
                )

    def finish(self) -> None:
        """Nothing was saved."""


def _places(arrays: Iterable[Array]) -> Iterator[tuple[int, int]]:
    """Addresses and bytes of arrays, each once."""
    yield from {(array.data_ptr(), array.nbytes) for array in arrays if array.nbytes}
