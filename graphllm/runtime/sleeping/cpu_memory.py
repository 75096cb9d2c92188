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
from graphllm.program.baked_table import PAGE
from graphllm.runtime.memory.memory import Array
from graphllm.runtime.memory.states import States
from graphllm.runtime.sleeping.rank_sleep import CACHE, DROPPED, WEIGHTS


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
        for start, nbytes in self._lent(tag, level):
            # In a file each parameter begins a page, and what follows it there is nobody's.
            is_file = tag == WEIGHTS and self._is_file
            give_back(start, -(-nbytes // PAGE) * PAGE if is_file else nbytes)

    def map(self, tag: str, level: int) -> None:
        if tag == WEIGHTS and self._is_file:
            return
        needed, left = sum(nbytes for _, nbytes in self._lent(tag, level)), available_memory()
        if needed > left:
            raise ConfigError(
                f"memory: {tag} takes {needed / 1e9:.1f} GB, there are {left / 1e9:.1f} GB left; free some, then wake "
                "up again"
            )
        if tag == CACHE:
            self._states.hold(False)

    def finish(self) -> None:
        """Nothing was saved."""

    def _lent(self, tag: str, level: int) -> Iterable[tuple[int, int]]:
        """Addresses and bytes of what is given back."""
        if tag == CACHE:
            return _places([*self._states.memories, self._scratch()])
        return self._weights if level == DROPPED or self._is_file else ()


def _places(arrays: Iterable[Array]) -> Iterator[tuple[int, int]]:
    """Addresses and bytes of arrays, each once."""
    yield from {(array.data_ptr(), array.nbytes) for array in arrays if array.nbytes}
