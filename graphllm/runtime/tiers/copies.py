"""Copies between a rank's device and its host memory, in order with the steps as far as they must be."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from graphllm.host.cuda_driver import CudaDriver
from graphllm.runtime.cuda.batch_copy import ANY, STREAM, BatchCopy
from graphllm.runtime.memory.states import States
from graphllm.runtime.tiers.host_memory import HostMemory, columns
from graphllm.runtime.tiers.registered_memory import RegisteredMemory

if TYPE_CHECKING:
    import torch

Pairs = Mapping[str, Sequence[tuple[int, int]]]  # by kind


class Ordered(Protocol):
    """The part of a rank's executor that copies use. states: on the device."""

    states: States

    def in_order(self, work: Callable[[], None]) -> None:
        """Launch work in order with the steps."""

    def synchronize(self) -> None:
        """Wait for everything so far."""


class Copies(Protocol):
    """Every copy has a ticket; tickets grow."""

    def store(self, pairs: Pairs, ticket: int, blocking: bool, reported: bool) -> None:
        """Copy (place, entry) to the host, as the steps so far have left the places. blocking: no later step or command
        begins before the copy has ended. reported: `ended` tells of it."""

    def load(self, pairs: Pairs, ticket: int) -> None:
        """Copy (entry, place) to the device, once the steps and stores so far have ended."""

    def wait(self, ticket: int) -> None:
        """Have all later steps and commands wait for the copies up to this one."""

    def ended(self) -> list[tuple[int, float]]:
        """The copies that have ended since this was last asked, and the seconds that each took."""

    def ready(self) -> dict[str, int]:
        """By kind, how many entries of host memory can be used so far."""

    def close(self) -> None:
        """Wait for all copies."""


class CpuCopies:
    """Of a CPU: by the thread that runs the steps, between them."""

    def __init__(self, device: Ordered, memory: HostMemory) -> None:
        self._device, self._memory = device, memory
        self._ended = deque[tuple[int, float]]()

    def store(self, pairs: Pairs, ticket: int, blocking: bool, reported: bool) -> None:
        def work() -> None:
            begun = time.perf_counter()
            for kind, of in pairs.items():
                places, entries = columns(of)
                pieces = self._memory.pieces(kind)
                for at, tensor in enumerate(self._device.states.entries(kind)):
                    pieces[entries, at] = tensor.numpy()[places]
            if reported:
                self._ended.append((ticket, time.perf_counter() - begun))

        self._device.in_order(work)

    def load(self, pairs: Pairs, ticket: int) -> None:
        states = self._device.states

        def work() -> None:
            begun = time.perf_counter()
            for kind, of in pairs.items():
                entries, places = columns(of)
                if kind == "blocks":
                    states.reach(int(places.max(initial=0)))
                pieces = self._memory.pieces(kind)
                for at, tensor in enumerate(states.entries(kind)):
                    tensor.numpy()[places] = pieces[entries, at]
            self._ended.append((ticket, time.perf_counter() - begun))

        self._device.in_order(work)

    def wait(self, ticket: int) -> None:
        """All is in order."""

    def ended(self) -> list[tuple[int, float]]:
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def ready(self) -> dict[str, int]:
        return {kind: len(self._memory.pieces(kind)) for kind in self._memory.kinds}

    def close(self) -> None:
        self._device.synchronize()


_Copy = tuple[int, "torch.cuda.Event", "torch.cuda.Event"]


class CudaCopies:
    """Of a GPU: on two streams of their own, from and to registered memory."""

    def __init__(self, device: Ordered, memory: HostMemory) -> None:
        import torch

        self._torch, self._device, self._memory = torch, device, memory
        self._stores, self._loads = torch.cuda.Stream(), torch.cuda.Stream()
        self._batch = BatchCopy(CudaDriver())
        self._registered = RegisteredMemory(memory)
        self._stored = deque[tuple[int, torch.cuda.Event]]()  # for `wait`
        # Of each direction: ticket, begin and end.
        self._storing, self._loading = deque[_Copy](), deque[_Copy]()

    def store(self, pairs: Pairs, ticket: int, blocking: bool, reported: bool) -> None:
        def work() -> None:
            steps = self._torch.cuda.current_stream()
            self._stores.wait_stream(steps)
            with self._torch.cuda.stream(self._stores):
                begun = self._event()
                for on_device, in_host, nbytes in self._pieces(pairs):
                    self._batch.copy(in_host, on_device, nbytes, self._stores.cuda_stream, STREAM)
                end = self._event()
            self._stored.append((ticket, end))
            if reported:
                self._storing.append((ticket, begun, end))
            if blocking:
                steps.wait_event(end)

        self._device.in_order(work)

    def load(self, pairs: Pairs, ticket: int) -> None:
        turned = {kind: [(place, entry) for entry, place in of] for kind, of in pairs.items()}

        def work() -> None:
            self._loads.wait_stream(self._torch.cuda.current_stream())
            self._loads.wait_stream(self._stores)
            with self._torch.cuda.stream(self._loads):
                begun = self._event()
                for on_device, in_host, nbytes in self._pieces(turned):
                    self._batch.copy(on_device, in_host, nbytes, self._loads.cuda_stream, ANY)
                self._loading.append((ticket, begun, self._event()))

        self._device.in_order(work)

    def _pieces(self, pairs: Pairs) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """Of pairs (place, entry), for each kind: the addresses of all pieces on the device and in host memory, and the
        bytes of a piece."""
        for kind, of in pairs.items():
            places, entries = columns(of)
            host, tensors = self._memory.pieces(kind), self._device.states.entries(kind)
            _, count, nbytes = host.shape
            first = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
            on_device = first[None] + places[:, None] * nbytes
            in_host = host.ctypes.data + (entries[:, None] * count + np.arange(count)) * nbytes
            yield on_device.reshape(-1), in_host.reshape(-1), nbytes

    def _event(self) -> torch.cuda.Event:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, ticket: int) -> None:
        def work() -> None:
            while self._stored and self._stored[0][1].query():
                self._stored.popleft()
            awaited = [event for number, event in self._stored if number <= ticket]
            if awaited:
                self._torch.cuda.current_stream().wait_event(awaited[-1])

        self._device.in_order(work)

    def ended(self) -> list[tuple[int, float]]:
        found = []
        for copies in (self._storing, self._loading):
            while copies and copies[0][2].query():
                ticket, begun, end = copies.popleft()
                found.append((ticket, begun.elapsed_time(end) / 1e3))
        return found

    def ready(self) -> dict[str, int]:
        return self._registered.ready()

    def close(self) -> None:
        self._stores.synchronize()
        self._loads.synchronize()
        self._registered.close()
