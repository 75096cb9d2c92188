"""The command that fills the tables of a LoRA adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphllm.runtime.commands.command import Command, Device, TensorData

if TYPE_CHECKING:
    import torch


class WriteAdapter(Command):
    """Fill an entry of the adapters' tables; a table that is not given becomes zero.

    tables: whole tables by their states' names; a rank takes its own part. If they lie in pinned memory, nothing waits
    for the copies.
    """

    entry: int
    tables: dict[str, TensorData]

    def run(self, device: Device) -> None:
        def work() -> None:
            for name in device.adapters:
                target = device.states.tensors[f"state.{name}"][self.entry]
                if name in self.tables:
                    _copy_own(device, target, name, self.tables[name].tensor)
                else:
                    target.zero_()

        device.in_order(work)


def _copy_own(device: Device, target: torch.Tensor, name: str, table: torch.Tensor) -> None:
    """Copy this rank's part of a table."""
    layer, _, which = name.rpartition(".lora_")
    linear = device.divided.get(layer)
    if linear is None or (divided := linear.divided(which)) is None:
        target.copy_(table, non_blocking=True)
        return
    dim, division = divided
    at = 0
    for start, stop in division.ranges(device.rank):
        target.narrow(dim, at, stop - start).copy_(table.narrow(dim, start, stop - start), non_blocking=True)
        at += stop - start
    target.narrow(dim, at, target.shape[dim] - at).zero_()
