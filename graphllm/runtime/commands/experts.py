"""The command that moves experts of a layer between ranks."""

from __future__ import annotations

from graphllm.runtime.commands.command import Command, Device


class MoveExperts(Command):
    """What changes in one layer between two steps.

    groups: copies (from slot, to slot); the copies of a group happen at once, one group after the other.
    placement: the expert in each slot after all of them.
    """

    layer: int
    groups: list[list[tuple[int, int]]]
    placement: list[int]

    def run(self, device: Device) -> None:
        slots = device.expert_slots
        assert slots is not None
        tables = slots.host_tables(self)
        device.in_order(lambda: slots.move(self, tables))
