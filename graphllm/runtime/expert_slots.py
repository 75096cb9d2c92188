"""Moves experts between the slots of ranks: their weights through the group, and the tables by which graphs find
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from graphllm.ir.groups import TENSOR, group_of
from graphllm.program.schema import ExpertLayout
from graphllm.runtime.commands.experts import MoveExperts
from graphllm.weights.plan.expert_slots import ROUTING_TABLES, routing_tables

_MOST_AT_ONCE = 2  # experts of a group of moves: two that change places


class ExpertSlots:
    """The experts that this process has.

    weights: by name, of the layers of this stage.

    The caller queues work after the steps before it; every rank makes the same calls.
    """

    def __init__(self, layout: ExpertLayout, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self._layout = layout
        here = {i: names for i, names in layout.layers.items() if names[0] in weights}
        self._parts = {i: [weights[name] for name in names] for i, names in here.items()}
        self._tables = {i: [weights[f"layers.{i}.{name}"] for name in ROUTING_TABLES] for i in here}
        self._on_way = torch.empty((_MOST_AT_ONCE, layout.bytes), dtype=torch.uint8, device=device)

    def host_tables(self, moves: MoveExperts) -> list[Tensor]:
        """The tables of the layer after the moves, on the host."""
        tables = [torch.tensor(t, dtype=torch.int32) for t in routing_tables(moves.placement, self._layout.experts)]
        return [t.pin_memory() for t in tables] if self._on_way.is_cuda else tables

    def move(self, moves: MoveExperts, tables: Sequence[Tensor]) -> None:
        """Carry out moves. tables: what `host_tables` gave; they may go when the stream has come here."""
        if moves.layer not in self._parts:
            return
        group = group_of(TENSOR, self._layout.ranks)
        count, parts = self._layout.slots_of_rank, self._parts[moves.layer]
        on_way = self._on_way[:, : sum(_bytes(part[0]).numel() for part in parts)]
        for at_once in moves.groups:
            for row, (source, target) in zip(on_way, at_once, strict=False):
                origin = source // count
                if origin == group.rank:
                    _pack(parts, source % count, row)
                if target // count != origin:
                    group.broadcast(row, origin)
            for row, (_, target) in zip(on_way, at_once, strict=False):
                if target // count == group.rank:
                    _unpack(row, parts, target % count)
        for table, new in zip(self._tables[moves.layer], tables, strict=True):
            table.copy_(new, non_blocking=True)


def _pack(parts: Sequence[Tensor], slot: int, row: Tensor) -> None:
    at = 0
    for part in parts:
        own = _bytes(part[slot])
        row[at : at + own.numel()].copy_(own)
        at += own.numel()


def _unpack(row: Tensor, parts: Sequence[Tensor], slot: int) -> None:
    at = 0
    for part in parts:
        own = _bytes(part[slot])
        own.copy_(row[at : at + own.numel()])
        at += own.numel()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
