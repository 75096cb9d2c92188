"""Commands over states: what requests begin with, blocks of the cache, snapshots of recurrent states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphllm.config import ConfigError
from graphllm.runtime.commands.command import Answered, Command, Device, Query, shares_of
from graphllm.runtime.memory.staging import StepInput

if TYPE_CHECKING:
    from graphllm.runtime.graphs import GraphPrograms

Pairs = list[tuple[int, int]]


class WriteEntry(Command):
    """Write the beginnings of a slot's states. values: by the state's name."""

    entry: int
    values: dict[str, np.ndarray]

    def run(self, device: Device) -> None:
        given = {name: device.memory.wrapped(np.ascontiguousarray(array)) for name, array in self.values.items()}
        if device.device.type == "cuda":  # from other memory a copy would wait for the steps before it
            given = {name: tensor.pin_memory() for name, tensor in given.items()}

        def work() -> None:
            for name, tensor in given.items():
                target = device.states.tensors[f"state.{name}"][self.entry, : len(tensor)]
                target.copy_(tensor, non_blocking=True)

        device.in_order(work)


class CopyBlocks(Command):
    """Copy blocks in every tensor of the pool. pairs: (from, to)."""

    pairs: Pairs

    def run(self, device: Device) -> None:
        device.in_order(lambda: device.states.copy_blocks(self.pairs))


class ResetSlots(Command):
    """Zero the recurrent states of slots."""

    slots: list[int]

    def run(self, device: Device) -> None:
        device.in_order(lambda: device.states.reset_slots(self.slots))


class SaveSnapshots(Command):
    """Copy recurrent states of slots to snapshots. pairs: (slot, snapshot)."""

    pairs: Pairs

    def run(self, device: Device) -> None:
        if device.snapshots is None:
            device.in_order(lambda: device.states.save_snapshots(self.pairs))
        else:
            _run_snapshots(device, device.snapshots, "save", self.pairs)


class LoadSnapshots(Command):
    """Copy snapshots to the recurrent states of slots. pairs: (snapshot, slot)."""

    pairs: Pairs

    def run(self, device: Device) -> None:
        pairs = [(slot, snapshot) for snapshot, slot in self.pairs]
        if device.snapshots is None:
            device.in_order(lambda: device.states.load_snapshots(self.pairs))
        else:
            device.in_order(lambda: device.states.use_first_version([slot for slot, _ in pairs]))
            _run_snapshots(device, device.snapshots, "load", pairs)


class ReadBlocks(Query):
    """The bytes of blocks, of all tensors one after another."""

    blocks: list[int]

    def run(self, device: Device) -> Answered:
        device.synchronize()
        return Answered(device.states.read_blocks(self.blocks))


class ReadSnapshots(Query):
    """The bytes of snapshots."""

    snapshots: list[int]

    def run(self, device: Device) -> Answered:
        device.synchronize()
        return Answered(device.states.read_snapshots(self.snapshots))


class WriteBlocks(Command):
    """Put back what `ReadBlocks` gave, maybe in another process.

    contents: of each block, the parts of all ranks one after another.
    sizes: bytes of a block on each rank, see `Executor.block_bytes`.
    """

    blocks: list[int]
    contents: list[bytes]
    sizes: list[int]

    def check(self, device: Device) -> None:
        _check_sizes("block", self.contents, sum(self.sizes))

    def run(self, device: Device) -> None:
        device.synchronize()
        device.states.write_blocks(self.blocks, shares_of(self.contents, self.sizes, device.worker.rank))


class WriteSnapshots(Command):
    """Put back what `ReadSnapshots` gave. The fields are as in `WriteBlocks`."""

    snapshots: list[int]
    contents: list[bytes]
    sizes: list[int]

    def check(self, device: Device) -> None:
        _check_sizes("snapshot", self.contents, sum(self.sizes))

    def run(self, device: Device) -> None:
        device.synchronize()
        device.states.write_snapshots(self.snapshots, shares_of(self.contents, self.sizes, device.worker.rank))


def _run_snapshots(device: Device, graph: GraphPrograms, program: str, pairs: Pairs) -> None:
    """Run a program of the task "snapshots". pairs: (slot, snapshot)."""
    count, (slots, snapshots) = len(pairs), np.array(pairs, dtype=np.int32).T
    step = StepInput(count, count, count, 1, {"slots": slots, "snapshots": snapshots})
    size, index = graph.pick(step), graph.next_buffer()
    graph.staging.fill(index, step, size.symbols)
    bound = graph.bound(program, size)

    def work() -> None:
        graph.staging.upload(index, size.symbols)
        bound.run()

    device.stream.release(0)  # a slot that a request has left is still written by the steps so far
    graph.jobs[index] = device.stream.submit(work)


def _check_sizes(what: str, contents: list[bytes], size: int) -> None:
    for content in contents:
        if len(content) != size:
            raise ConfigError(
                f"imported {what} has {len(content)} bytes, here it has {size}: it comes from an engine with another "
                "model, dtype or block size; use the same ones"
            )
