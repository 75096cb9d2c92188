"""How long a process has been silent. One that is only starved of the processor is not dead: its silence counts in time
in which it could have run. So nothing counts while one of its threads waits for a processor, as the kernel says in
/proc, nor by how much the watcher itself comes too late. Where /proc does not say it, only the watcher's delay is left
out.

The thread that waits may be any: the one that gives signs of life, the one that has the interpreter's lock, or one that
this one waits for in a kernel.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

_UNSEEN = 1.0


class Thread(NamedTuple):
    """What the kernel has counted for a thread.

    ran: nanoseconds on a processor.
    waited: nanoseconds in the queue for one, as far as the wait has ended.
    turns: how often it got a processor.
    runnable: it runs, or waits for a processor.
    """

    ran: int
    waited: int
    turns: int
    runnable: bool


Threads: TypeAlias = Mapping[int, Thread]


def threads_of(pid: int, family: bool = False) -> Threads:
    """The threads of a process, by their number; none where /proc does not say. family: also threads of its
    children."""
    found: dict[int, Thread] = {}
    folder = Path(f"/proc/{pid}/task")
    with contextlib.suppress(OSError):
        for tid in os.listdir(folder):
            with contextlib.suppress(OSError, ValueError):  # it has ended
                # In this order: what did not get its turn up to the second look was waiting at the first.
                state = (folder / tid / "stat").read_text().rpartition(")")[2].split()[0]
                ran, waited, turns = map(int, (folder / tid / "schedstat").read_text().split())
                found[int(tid)] = Thread(ran, waited, turns, state == "R")
            if family:
                with contextlib.suppress(OSError):
                    for child in (folder / tid / "children").read_text().split():
                        found |= threads_of(int(child))
    return found


def _share_waited(before: Threads, now: Threads, seconds: float) -> float:
    """The largest share of the time between two looks in which a thread waited for a processor."""
    most = 0.0
    for tid, thread in now.items():
        if (was := before.get(tid)) is None:
            continue
        if thread == was and thread.runnable:  # its wait has not ended, so the kernel has not counted it yet
            return 1.0
        most = max(most, (thread.waited - was.waited) / 1e9)
    return min(1.0, most / seconds) if seconds > 0 else 0.0


class Silence:
    """How long one process has been silent.

    threads: returns the threads that it depends on, see `threads_of`.
    tick: seconds between two looks of the watcher; a longer pause counts as one tick.
    unseen: seconds of silence in which nobody looks at the threads.
    """

    def __init__(
        self,
        threads: Callable[[], Threads],
        tick: float,
        unseen: float = _UNSEEN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threads, self._tick, self._unseen, self._clock = threads, tick, unseen, clock
        self.heard()

    def heard(self) -> None:
        """It has given a sign of life."""
        self.seconds, self._looked = 0.0, self._clock()
        self._before: Threads = {}

    def look(self) -> float:
        """See how it does, once in every tick: the seconds in which it could have given a sign of life."""
        now = self._clock()
        passed, self._looked = now - self._looked, now
        share = 0.0
        if self.seconds >= self._unseen:
            threads = self._threads()
            share = _share_waited(self._before, threads, passed)
            self._before = threads
        self.seconds += min(passed, self._tick) * (1 - share)
        return self.seconds
