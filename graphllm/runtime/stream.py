"""An ordered queue of device work that the host does not wait for: a CUDA stream, or a thread on a CPU."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch


class Job(Protocol):
    """Work that was submitted."""

    def result(self) -> Any:
        """Wait until it is done. Raises what it raised."""


class Stream(Protocol):
    """Runs functions in the order in which they are submitted; on a GPU what they launch, not themselves, is
    awaited."""

    def submit(self, work: Callable[[], None]) -> Job: ...

    def close(self) -> None: ...


class CpuStream:
    """One thread, whose kernels share their work with ``threads`` - 1 more. Kernels release the interpreter while they
    compute, so the host goes on.

    It should be the only thread of the process that runs torch operations on several threads, because each such thread
    has OpenMP threads of its own: with more of them than CPUs, none spins for the next parallel region any more, and
    waking them takes 70 microseconds instead of 1 (`bench/results/cpu_decode.md`). See `alone`.
    """

    def __init__(self, threads: int) -> None:
        # A thread has an OpenMP setting of its own.
        self._pool = concurrent.futures.ThreadPoolExecutor(
            1, "graphllm-cpu-stream", initializer=torch.set_num_threads, initargs=(threads,)
        )

    def submit(self, work: Callable[[], None]) -> Job:
        """Queue the work."""
        return self._pool.submit(work)

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._pool.shutdown()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Keep the calling thread's torch operations to that thread meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class CudaStream:
    """A CUDA stream; its number is ``handle``."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self.handle = self._stream.cuda_stream

    def submit(self, work: Callable[[], None]) -> Job:
        """Run the work, whose launches go to the stream."""
        with torch.cuda.stream(self._stream):
            work()
            event = torch.cuda.Event()
            event.record(self._stream)
        return _Recorded(event)

    def close(self) -> None:
        """Wait for everything launched."""
        self._stream.synchronize()


class _Recorded:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def result(self) -> None:
        """Wait for the event."""
        self._event.synchronize()
