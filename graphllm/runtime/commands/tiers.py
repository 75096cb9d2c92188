"""Commands over a rank's tiers: copies between the device and host memory, by the numbers of places and entries."""

from __future__ import annotations

from collections.abc import Callable

from graphllm.runtime.commands.command import Answered, Command, Device, Query
from graphllm.runtime.commands.states import Pairs
from graphllm.runtime.tiers.copies import Copies, CpuCopies, Ordered
from graphllm.runtime.tiers.cuda_copies import CudaCopies
from graphllm.runtime.tiers.host_memory import HostMemory, shapes_of

_KEPT = "tiers"  # in `Worker.kept`
_COPIES: dict[str, Callable[[Ordered, HostMemory], Copies]] = {"cpu": CpuCopies, "cuda": CudaCopies}


class RankTiers:
    """memory: host memory of this rank. copies: between it and the device."""

    def __init__(self, device: Device, entries: dict[str, int], shared: bool) -> None:
        shapes = shapes_of({kind: device.states.entries(kind) for kind in entries})
        self.memory = HostMemory(entries, shapes, shared)
        self.copies = _COPIES[device.device.type](device, self.memory)


def tiers_of(device: Device) -> RankTiers:
    """What `OpenTiers` has made."""
    found: RankTiers = device.worker.kept[_KEPT]
    return found


class OpenTiers(Command):
    """Take host memory.

    entries: of each kind, "blocks" and "snapshots"; all ranks have equal numbers of them.
    shared: other engines of this host may map it.
    """

    entries: dict[str, int]
    shared: bool = False

    def run(self, device: Device) -> None:
        device.worker.kept[_KEPT] = RankTiers(device, self.entries, self.shared)


class CloseTiers(Command):
    """Give host memory back."""

    def run(self, device: Device) -> None:
        found: RankTiers | None = device.worker.kept.pop(_KEPT, None)
        if found is not None:
            found.copies.close()
            found.memory.close()


class StoreEntries(Command):
    """Copy to host memory; see `Copies.store`. pairs: (place, entry), by kind."""

    pairs: dict[str, Pairs]
    ticket: int
    blocking: bool
    reported: bool

    def run(self, device: Device) -> None:
        tiers_of(device).copies.store(self.pairs, self.ticket, self.blocking, self.reported)


class LoadEntries(Command):
    """Copy to the device; see `Copies.load`. pairs: (entry, place), by kind. after: the last store that must have ended
    before."""

    pairs: dict[str, Pairs]
    ticket: int
    after: int

    def run(self, device: Device) -> None:
        tiers_of(device).copies.load(self.pairs, self.ticket, self.after)


class AwaitStores(Command):
    """Have later steps wait for the stores up to this ticket."""

    ticket: int

    def run(self, device: Device) -> None:
        tiers_of(device).copies.wait(self.ticket)


class PrepareEntries(Command):
    """Have entries of host memory ready, as soon as can be; `ReadyEntries` tells when. entries: numbers of each kind,
    the first ones."""

    entries: dict[str, int]

    def run(self, device: Device) -> None:
        tiers_of(device).copies.prepare(self.entries)


class EndedCopies(Query):
    """The copies that have ended since this was last asked, with the seconds of each."""

    def run(self, device: Device) -> Answered:
        return Answered([list(pair) for pair in tiers_of(device).copies.ended()])


class ReadyEntries(Query):
    """How many entries of host memory can be used so far, by kind."""

    def run(self, device: Device) -> Answered:
        return Answered(tiers_of(device).copies.ready())
