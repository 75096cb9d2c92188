"""Work that several threads do together, until one of them fails. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Todo(Generic[T]):
    """Jobs, handed out in order to whichever thread asks; none any more once it is stopped."""

    def __init__(self, jobs: Iterable[T]) -> None:
        self._jobs, self._lock = iter(jobs), threading.Lock()

    def __iter__(self) -> Iterator[T]:
        while True:
            with self._lock:
                job = next(self._jobs, None)
            if job is None:
                return
            yield job

    def stop(self) -> None:
        with self._lock:
            self._jobs = iter(())


class SharedCounter:
    """Adds up what was read and reports it, from any thread, one call at a time."""

    def __init__(self, total: int, report: Callable[[int, int], None] | None) -> None:
        self.done, self._total, self.report = 0, total, report
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
            if self.report is not None:
                self.report(self.done, self._total)


def run(work: Callable[[], None], threads: int, todo: Todo[T]) -> None:
    """Do the work in several threads. When one fails, the others stop and its error is raised."""

    def guarded() -> None:
        try:
            work()
        except BaseException:
            todo.stop()
            raise

    with ThreadPoolExecutor(threads) as pool:
        try:
            for future in [pool.submit(guarded) for _ in range(threads)]:
                future.result()
        finally:
            todo.stop()  # an interrupt of this thread ends them too
