"""An ordered queue of device work that the host does not wait for: a CUDA stream, or a thread on a CPU."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Job(Protocol):
    """Work that was submitted."""

    def result(self) -> Any:
        """Wait until it is done. Raises what it raised."""

    def wait(self, seconds: float) -> bool:
        """Whether it is done within that time; raises nothing."""


class Stream(Protocol):
    """Runs functions in the order in which they are submitted; on a GPU what they launch, not themselves, is
    awaited."""

    def submit(self, work: Callable[[], Any]) -> Job: ...

    def close(self) -> None: ...


def nothing() -> None:
    """Work that only marks a place in the queue."""


class CpuStream:
    """A thread that runs kernels; each kernel shares its work with ``threads`` - 1 more. Kernels release the
    interpreter while they compute, so the host goes on.

    It should be the only thread of the process that runs torch operations on several threads, because each such thread
    has OpenMP threads of its own: with more of them than CPUs, none spins for the next parallel region any more, and
    waking them takes 70 microseconds instead of 1 (`bench/notes/cpu_decode.md`). See `alone`.
    """

    def __init__(self, threads: int, set_threads: Callable[[int], None] | None = None) -> None:
        """set_threads: sets the number of threads for the calling thread's kernels; None: torch's function."""
        begin = functools.partial(set_threads or _torch_threads(), threads)
        self._queue: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_serve, args=(self._queue, begin), name="graphllm-cpu-stream", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _finish, self._queue, thread)  # at the interpreter's end too

    def submit(self, work: Callable[[], Any]) -> Job:
        """Queue the work. Raises RuntimeError after `close`."""
        if not self._end.alive:
            raise RuntimeError("the CPU stream is closed")
        job = _Queued(work)
        self._queue.put(job)
        return job

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._end()

    def let_exit(self) -> None:
        """The interpreter's end waits for nothing of it."""
        self._end.atexit = False

    def abandon(self) -> None:
        """Close it without an end of what it does, which may wait for ever."""
        self._end.detach()


class _Queued:
    """Work for the thread. It is lighter than a future: a lock wakes the waiting thread. With as many kernel threads as
    CPUs, kernels wait for the host's share of a step."""

    __slots__ = ("_done", "_failure", "_value", "_work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work: Callable[[], Any] | None = work
        self._value: Any = None
        self._failure: BaseException | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def run(self) -> None:
        assert self._work is not None
        try:
            self._value = self._work()
        except BaseException as failure:  # whoever waits raises it
            self._failure = failure
        self._work = None  # it may hold the job
        self._done.release()

    def wait(self, seconds: float) -> bool:
        done = self._done.acquire(timeout=seconds)
        if done:
            self._done.release()
        return done

    def result(self) -> Any:
        with self._done:
            if self._failure is not None:
                raise self._failure
            return self._value


def _torch_threads() -> Callable[[int], None]:
    import torch  # now: a thread cannot at the interpreter's end

    def set_threads(threads: int) -> None:
        torch.get_num_threads()  # torch sets up its threads now, not after the next line
        torch.set_num_threads(threads)  # a thread has an OpenMP setting of its own

    return set_threads


def _serve(work: queue.SimpleQueue[_Queued | None], begin: Callable[[], None]) -> None:
    begin()
    while (job := work.get()) is not None:
        job.run()
        del job  # what it holds may go, while the thread waits for the next


def _finish(work: queue.SimpleQueue[_Queued | None], thread: threading.Thread) -> None:
    work.put(None)
    if thread is not threading.current_thread():  # where the last to hold the stream was a job
        thread.join()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Within the context, torch operations of the calling thread use only that thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class CudaStream:
    """A CUDA stream; its number is ``handle``."""

    def __init__(self) -> None:
        import torch

        self._torch, self._stream = torch, torch.cuda.Stream()
        self.handle = self._stream.cuda_stream

    def submit(self, work: Callable[[], Any]) -> Job:
        """Run the work; its launches go to the stream."""
        with self._torch.cuda.stream(self._stream):
            work()
            event = self._torch.cuda.Event()
            event.record(self._stream)
        return _Recorded(event)

    def close(self) -> None:
        """Wait for everything launched."""
        self._stream.synchronize()


class _Recorded:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self, seconds: float) -> bool:
        """Look again and again, as waiting for an event does, and let other threads run in between."""
        until = time.monotonic() + seconds
        while not (done := self._event.query()) and time.monotonic() < until:
            time.sleep(0)
        return done

    def result(self) -> None:
        """Wait for the event."""
        self._event.synchronize()
