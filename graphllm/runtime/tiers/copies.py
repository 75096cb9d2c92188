"""Copies between a rank's device and its host memory, in order with the steps as far as they must be."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from graphllm.runtime.memory.states import States
from graphllm.runtime.tiers.host_memory import HostMemory, columns

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

    def load(self, pairs: Pairs, ticket: int, after: int) -> None:
        """Copy (entry, place) to the device, once the steps so far and the stores up to ``after`` have ended."""

    def wait(self, ticket: int) -> None:
        """Have all later steps and commands wait for the copies up to this one."""

    def ended(self) -> list[tuple[int, float]]:
        """The copies that have ended since this was last asked, and the seconds that each took."""

    def prepare(self, entries: Mapping[str, int]) -> None:
        """Have so many entries of host memory of each kind, the first ones, ready as soon as can be."""

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

    def load(self, pairs: Pairs, ticket: int, after: int) -> None:
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

    def prepare(self, entries: Mapping[str, int]) -> None:
        """The system gives memory when it is first written."""

    def ready(self) -> dict[str, int]:
        return {kind: len(self._memory.pieces(kind)) for kind in self._memory.kinds}

    def close(self) -> None:
        self._device.synchronize()
