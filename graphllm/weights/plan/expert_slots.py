"""Where the experts of a layer lie: in slots, as many on each rank, which hold copies of the busy ones. No torch.

A placement says which expert each slot holds, the slots of rank 0 first. Graphs find an expert's slots by two tables
made of it, so another placement is other numbers in their memory and nothing is compiled anew."""

from __future__ import annotations

from collections.abc import Sequence

ROUTING_TABLES = ("expert_starts", "expert_slots")  # their names among the weights of a layer


def first_placement(experts: int, redundant: int) -> tuple[int, ...]:
    """The one that weights are loaded in: every expert in order, then the first ones again."""
    return tuple(slot % experts for slot in range(experts + redundant))


def routing_tables(placement: Sequence[int], experts: int) -> tuple[list[int], list[int]]:
    """Where the slots of each expert begin in a list of all of them, with the end, [experts + 1]; and that list."""
    slots = sorted(range(len(placement)), key=lambda slot: (placement[slot], slot))
    starts, at = [0], 0
    for expert in range(experts):
        while at < len(slots) and placement[slots[at]] == expert:
            at += 1
        starts.append(at)
    return starts, slots
