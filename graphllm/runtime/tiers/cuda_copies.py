"""CudaCopies: the copies of a GPU. Each direction has a stream, and a thread that gives the driver its copies.

The driver takes copies no faster than they run, so whoever gives it many waits. The thread of the steps therefore only
records how far the steps are. It waits for a copying thread where later steps need the end of a copy.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from graphllm.host.cuda_driver import CudaDriver
from graphllm.runtime.cuda.batch_copy import ANY, STREAM, BatchCopy
from graphllm.runtime.cuda.registered_memory import RegisteredMemory
from graphllm.runtime.tiers.copies import Ordered, Pairs
from graphllm.runtime.tiers.host_memory import HostMemory, columns

if TYPE_CHECKING:
    import torch

_AT_ONCE = 512  # pieces of one call: with a hundred times as many, the driver is slower
_QUEUED = 4  # calls of one direction that the driver has at a time

Pieces = Iterator[tuple[np.ndarray, np.ndarray, int]]  # addresses to copy to and from, and the bytes of a piece


class CudaCopies:
    """Between the device and registered memory; see `Copies`."""

    def __init__(self, device: Ordered, memory: HostMemory) -> None:
        import torch

        driver = CudaDriver()
        self._torch, self._device, self._memory = torch, device, memory
        self._registered = RegisteredMemory({kind: memory.pieces(kind) for kind in memory.kinds}, driver)
        self._stores, self._loads = _Direction("stores", driver, STREAM), _Direction("loads", driver, ANY)

    def store(self, pairs: Pairs, ticket: int, blocking: bool, reported: bool) -> None:
        def work() -> None:
            copy = self._stores.begin(ticket, [self._steps()], lambda: self._to_host(pairs), reported)
            if blocking:
                self._await(copy)

        self._device.in_order(work)

    def load(self, pairs: Pairs, ticket: int, after: int) -> None:
        def work() -> None:
            before: list[torch.cuda.Event | Copy] = [self._steps()]
            if (store := self._stores.find(after)) is not None:
                before.append(store)
            self._loads.begin(ticket, before, lambda: self._to_device(pairs), True)

        self._device.in_order(work)

    def wait(self, ticket: int) -> None:
        def work() -> None:
            if (copy := self._stores.find(ticket)) is not None:
                self._await(copy)

        self._device.in_order(work)

    def ended(self) -> list[tuple[int, float]]:
        return self._stores.ended() + self._loads.ended()

    def prepare(self, entries: Mapping[str, int]) -> None:
        self._registered.prepare(entries)

    def ready(self) -> dict[str, int]:
        return self._registered.ready()

    def close(self) -> None:
        self._stores.close()
        self._loads.close()
        self._registered.close()

    def _steps(self) -> torch.cuda.Event:
        """The end of all steps so far."""
        event = self._torch.cuda.Event()
        event.record()
        return event

    def _await(self, copy: Copy) -> None:
        """Have later steps wait for its end."""
        copy.issued.result()
        self._torch.cuda.current_stream().wait_event(copy.end)

    def _to_host(self, pairs: Pairs) -> Pieces:
        for kind, of in pairs.items():
            places, entries = columns(of)
            on_device, in_host, nbytes = self._addresses(kind, places, entries)
            yield in_host, on_device, nbytes

    def _to_device(self, pairs: Pairs) -> Pieces:
        for kind, of in pairs.items():
            entries, places = columns(of)
            yield self._addresses(kind, places, entries)

    def _addresses(self, kind: str, places: np.ndarray, entries: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Of all pieces of these places and entries: the addresses on the device and in host memory, and the bytes of
        a piece."""
        host, tensors = self._memory.pieces(kind), self._device.states.entries(kind)
        _, count, nbytes = host.shape
        first = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
        on_device = first[None] + places[:, None] * nbytes
        in_host = host.ctypes.data + (entries[:, None] * count + np.arange(count)) * nbytes
        return on_device.reshape(-1).view(np.uint64), in_host.reshape(-1).view(np.uint64), nbytes


class Copy:
    """A copy of many pieces.

    begun, end: recorded in its stream, once it is `issued`.
    """

    def __init__(self, ticket: int, event: Callable[[], torch.cuda.Event]) -> None:
        self.ticket, self.begun, self.end = ticket, event(), event()
        self.issued: Future[None] = Future()

    def has_ended(self) -> bool:
        """Raises what kept it from being issued."""
        if not self.issued.done():
            return False
        self.issued.result()
        return self.end.query()


class _Direction:
    """A stream of copies, one after another, and the thread that issues them. The methods run in other threads."""

    def __init__(self, name: str, driver: CudaDriver, order: int) -> None:
        import torch

        self._torch, self._stream, self._order = torch, torch.cuda.Stream(), order
        self._batch = BatchCopy(driver)
        begin = functools.partial(driver.use, driver.current())
        self._thread = ThreadPoolExecutor(1, f"graphllm-{name}", initializer=begin)
        self._copies = deque[Copy]()  # those that may run, for `find`
        self._reported = deque[Copy]()  # those that `ended` is to tell of
        self._queued = deque[torch.cuda.Event]()  # ends of calls

    def begin(
        self, ticket: int, after: Sequence[torch.cuda.Event | Copy], pieces: Callable[[], Pieces], reported: bool
    ) -> Copy:
        """Copy, once all of ``after`` has ended. Raises what has kept a copy before from being issued."""
        while self._copies and self._copies[0].has_ended():
            self._copies.popleft()
        copy = Copy(ticket, functools.partial(self._torch.cuda.Event, enable_timing=True))
        copy.issued = self._thread.submit(self._issue, copy, after, pieces)
        self._copies.append(copy)
        if reported:
            self._reported.append(copy)
        return copy

    def find(self, ticket: int) -> Copy | None:
        """The last copy up to this one; None where all of them have ended."""
        found = [copy for copy in self._copies if copy.ticket <= ticket]
        return None if not found or found[-1].has_ended() else found[-1]

    def ended(self) -> list[tuple[int, float]]:
        """Tickets and seconds of copies, each of them once."""
        found = []
        while self._reported and self._reported[0].has_ended():
            copy = self._reported.popleft()
            found.append((copy.ticket, copy.begun.elapsed_time(copy.end) / 1e3))
        return found

    def close(self) -> None:
        """Wait for all copies."""
        self._thread.shutdown()
        self._stream.synchronize()

    def _issue(self, copy: Copy, after: Sequence[torch.cuda.Event | Copy], pieces: Callable[[], Pieces]) -> None:
        for one in after:
            if isinstance(one, Copy):
                one.issued.result()
                one = one.end
            self._stream.wait_event(one)
        copy.begun.record(self._stream)
        for to, of, nbytes in pieces():
            for at in range(0, len(to), _AT_ONCE):
                part = slice(at, at + _AT_ONCE)
                while len(self._queued) >= _QUEUED:
                    self._queued.popleft().synchronize()
                self._batch.copy(to[part], of[part], nbytes, self._stream.cuda_stream, self._order)
                mark = self._torch.cuda.Event(blocking=True)
                mark.record(self._stream)
                self._queued.append(mark)
        copy.end.record(self._stream)
