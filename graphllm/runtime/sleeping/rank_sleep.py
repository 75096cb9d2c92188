"""One rank's sleep: which of its memory is given back, and how it comes back. The addresses stay.

What is bound to the memory, as programs and captured graphs, stays valid: only what lies under the addresses goes.
`SleepMemory` is the device's side, for a CPU in `cpu_memory.py` and for a GPU in `cuda_memory.py`. No torch in here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

WEIGHTS, CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, CACHE)  # in the order of waking up
KEPT, DROPPED = 1, 2  # levels: whether weights are kept on the host
KEY = "sleep"  # of `Worker.kept`


class SleepMemory(Protocol):
    """Memory of one rank by tags. Nothing of the rank runs while a method is called."""

    def save(self, level: int) -> None:
        """Copy to the host what `map` must bring back. Raises where the host has no room; then nothing has changed.
        level: of the sleep that follows."""

    def unmap(self, tag: str, level: int) -> None:
        """Give memory back. What is given back already is passed over."""

    def map(self, tag: str, level: int) -> None:
        """Have memory again: what was saved, and zeros elsewhere. It is still being filled. Raises where the device
        has no room; then some of it may be there, and `unmap` must follow."""

    def finish(self) -> None:
        """Wait until all is filled."""


class RankSleep:
    """The state of one rank.

    memory: gives memory back and takes it again.
    reload: reads all weights from their files, into the memory where they were.
    fixed: why weights cannot be read again; "" where they can.
    asleep: tags of memory that is given back.
    level: of the last sleep of the weights.
    """

    def __init__(self, memory: SleepMemory, reload: Callable[[], object], fixed: str = "") -> None:
        self._memory, self._reload, self.fixed = memory, reload, fixed
        self.asleep: set[str] = set()
        self.level = KEPT

    def sleep(self, level: int, tags: Sequence[str]) -> list[str]:
        """Give back the memory of these tags; the tags that were awake before. Nothing has changed when this raises."""
        found = [tag for tag in TAGS if tag in tags and tag not in self.asleep]
        if WEIGHTS in found:
            self._memory.save(level)
            self.level = level
        self.put_back(found)
        return found

    def wake(self, tags: Sequence[str]) -> list[str]:
        """Have the memory of these tags and what was in it; the tags that were asleep before. They are asleep again
        when this raises."""
        found = [tag for tag in TAGS if tag in tags and tag in self.asleep]
        try:
            for tag in found:
                self._memory.map(tag, self.level)
            self._memory.finish()
            if WEIGHTS in found and self.level == DROPPED:
                self._reload()
        except Exception:
            self.put_back(found)
            raise
        self.asleep.difference_update(found)
        return found

    def put_back(self, tags: Sequence[str]) -> None:
        """Give memory back that no step has written since it was saved."""
        for tag in tags:
            self._memory.unmap(tag, self.level)
            self.asleep.add(tag)
