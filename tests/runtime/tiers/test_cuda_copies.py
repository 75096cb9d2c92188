"""Copies of a simulated GPU that does everything as late as it may: all is as if each command had run at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from graphllm.host.cuda_driver import CudaError
from graphllm.runtime.tiers import cuda_copies
from graphllm.runtime.tiers.cuda_copies import CudaCopies
from graphllm.runtime.tiers.host_memory import HostMemory
from tests.runtime.tiers.simulated_gpu import SimulatedGPU

PLACES, ENTRIES, PIECES, BYTES = 24, 40, 3, 16


class Rank:
    """The part of an executor that copies use, and steps that write places."""

    def __init__(self, gpu: SimulatedGPU) -> None:
        self.gpu, self.tensors = gpu, [torch.full((PLACES, BYTES), n, dtype=torch.uint8) for n in range(PIECES)]
        self.states: Any = SimpleNamespace(entries=lambda kind: self.tensors)

    def in_order(self, work: Callable[[], None]) -> None:
        work()

    def synchronize(self) -> None:
        self.gpu.steps.synchronize()

    def write(self, place: int, value: int) -> None:
        """A step."""

        def run() -> None:
            for number, tensor in enumerate(self.tensors):
                tensor[place] = (value + number) % 256

        self.gpu.put(self.gpu.steps, run)

    def read(self, place: int) -> int:
        values = [tensor[place].unique().tolist() for tensor in self.tensors]
        assert values == [[(values[0][0] + number) % 256] for number in range(PIECES)]
        return int(values[0][0])


def opened(gpu: SimulatedGPU) -> tuple[Rank, HostMemory, CudaCopies]:
    rank, memory = Rank(gpu), HostMemory({"blocks": ENTRIES}, {"blocks": (PIECES, BYTES)})
    return rank, memory, CudaCopies(rank, memory)


@pytest.mark.parametrize("seed", range(6))
def test_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, stores and loads at random. What a copy reads is not overwritten before somebody has waited for it."""
    monkeypatch.setattr(cuda_copies, "_AT_ONCE", 4)
    draw, gpu = random.Random(seed), SimulatedGPU(seed, monkeypatch)
    rank, memory, copies = opened(gpu)
    device, host = [0] * PLACES, dict[int, int]()
    reading, writing = dict[int, int](), dict[int, dict[int, int]]()  # by place and by load: a ticket, places
    pinned = dict[int, set[int]]()  # by load: entries that it reads
    told, stored = set[int](), dict[int, int]()  # stored: by entry
    for ticket in range(1, 200):
        coming = {place for places in writing.values() for place in places}
        free = [place for place in range(PLACES) if place not in coming]
        read = {entry for entries in pinned.values() for entry in entries}
        match draw.choice(["step", "store", "store", "rescue", "load", "look"]):
            case "step":
                for place in draw.sample(free, min(3, len(free))):
                    if place in reading:
                        copies.wait(reading.pop(place))
                    device[place] = draw.randrange(256)
                    rank.write(place, device[place])
            case "store" | "rescue" as kind:
                places = draw.sample(free, min(5, len(free)))
                entries = draw.sample([entry for entry in range(ENTRIES) if entry not in read], len(places))
                copies.store({"blocks": list(zip(places, entries, strict=True))}, ticket, kind == "rescue", True)
                told.add(ticket)
                stored.update(dict.fromkeys(entries, ticket))
                host.update(zip(entries, (device[place] for place in places), strict=True))
                if kind == "store":
                    reading.update(dict.fromkeys(places, ticket))
            case "load" if host:
                places = [place for place in free if place not in reading][:4]
                entries = draw.sample(sorted(host), min(len(host), len(places)))
                after = max(stored[entry] for entry in entries) if entries else 0
                copies.load({"blocks": list(zip(entries, places, strict=False))}, ticket, after)
                told.add(ticket)
                writing[ticket] = dict(zip(places, (host[entry] for entry in entries), strict=False))
                pinned[ticket] = set(entries)
            case "look":
                for ended, seconds in copies.ended():
                    assert seconds > 0
                    told.remove(ended)
                    pinned.pop(ended, None)
                    for place, value in writing.pop(ended, {}).items():
                        device[place] = value
                        assert rank.read(place) == value
    copies.close()
    rank.synchronize()
    assert {ended for ended, _ in copies.ended()} == told
    for places in writing.values():
        for place, value in places.items():
            device[place] = value
    assert [rank.read(place) for place in range(PLACES)] == device
    for entry, value in host.items():
        wanted = (value + np.arange(PIECES)[:, None].repeat(BYTES, 1)) % 256
        assert np.array_equal(memory.pieces("blocks")[entry], wanted)
    assert gpu.most_queued <= cuda_copies._QUEUED


def test_the_steps_do_not_wait_for_a_long_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's queue is full, and nothing runs."""
    monkeypatch.setattr(cuda_copies, "_AT_ONCE", 1)
    gpu = SimulatedGPU(0, monkeypatch)
    rank, _, copies = opened(gpu)
    gpu.put(gpu.steps, lambda: None, lambda: free)
    free = False
    pairs = [(place, place) for place in range(PLACES)]
    for ticket in range(3):
        copies.store({"blocks": pairs}, ticket, False, True)
        copies.load({"blocks": pairs}, ticket + 10, ticket)
        rank.write(0, 7)
        assert copies.ended() == []
    free = True
    copies.close()
    assert [ticket for ticket, _ in copies.ended()] == [0, 1, 2, 10, 11, 12]


@pytest.mark.parametrize("taken", [0, 2])
def test_a_failure_is_raised_by_the_next_command(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_copies, "_AT_ONCE", 1)
    gpu = SimulatedGPU(0, monkeypatch)
    _, _, copies = opened(gpu)
    gpu.failing = taken
    copies.store({"blocks": [(i, i) for i in range(5)]}, 1, False, False)
    with pytest.raises(CudaError, match="cuMemcpyBatchAsync failed"):
        copies.wait(1)
    for _ in range(2):
        with pytest.raises(CudaError, match="cuMemcpyBatchAsync failed"):
            copies.store({"blocks": [(1, 1)]}, 2, True, False)
    with pytest.raises(CudaError, match="cuMemcpyBatchAsync failed"):
        copies.load({"blocks": [(1, 1)]}, 3, 2)
    copies.close()
