"""ItemCache: where the rows of encoded inputs (images, audio, a source text) lie, by their content.

An encoder writes the rows of an item once; every request with the same content reads them there. An item's rows lie
side by side, so what is managed is ranges. Those that no request holds stay until their place is needed, the least
recently used go first.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from graphllm.config import ConfigError
from graphllm.engine.requests.request import EngineRequest, Item
from graphllm.program.specs import InputSpec


class _Range:
    __slots__ = ("holders", "length", "start")

    def __init__(self, start: int, length: int) -> None:
        self.start, self.length, self.holders = start, length, 0


class ItemCache:
    """Places of rows, by the content of items.

    rows: rows of the item states.
    caching: whether an item's rows are kept when no request holds them any more.
    """

    def __init__(self, rows: int, caching: bool) -> None:
        self.rows, self._caching = rows, caching
        self._ranges: dict[str, _Range] = {}
        self._unheld: OrderedDict[str, None] = OrderedDict()

    @property
    def held_rows(self) -> int:
        """Rows of items that requests hold."""
        return sum(r.length for r in self._ranges.values() if r.holders)

    def acquire(self, items: Iterable[Item]) -> tuple[list[int], list[tuple[Item, int]]] | None:
        """Hold all of these items for one request: the first row of each, and the items, with their first rows, that
        are new and must be encoded. None, and nothing held, when there is no room now."""
        items = list(items)
        placed = self._acquire(items)
        if placed is None and not self.held_rows:  # what is kept lies in the way, in pieces
            self.reset()
            placed = self._acquire(items)
        return placed

    def _acquire(self, items: list[Item]) -> tuple[list[int], list[tuple[Item, int]]] | None:
        starts: list[int] = []
        held: list[str] = []
        new: list[tuple[Item, int]] = []
        for item in items:
            found = self._ranges.get(item.content_hash)
            if found is None:
                start = self._place(item.length)
                if start < 0:
                    self.release(held)
                    self.forget(new)
                    return None
                found = self._ranges[item.content_hash] = _Range(start, item.length)
                new.append((item, start))
            found.holders += 1
            self._unheld.pop(item.content_hash, None)
            held.append(item.content_hash)
            starts.append(found.start)
        return starts, new

    def release(self, hashes: Iterable[str]) -> None:
        """One holder less for each."""
        for hash in hashes:
            held = self._ranges[hash]
            held.holders -= 1
            if held.holders == 0:
                self._unheld[hash] = None
                if not self._caching:
                    self._drop(hash)

    def forget(self, new: Iterable[tuple[Item, int]]) -> None:
        """Drop items that were new and that no encoder will run for."""
        for item, _ in new:
            if item.content_hash in self._ranges:
                self._drop(item.content_hash)

    def reset(self) -> None:
        """Forget what no request holds."""
        for hash in list(self._unheld):
            self._drop(hash)

    def _place(self, length: int) -> int:
        """The first row of a gap of that length, for which unheld items are dropped as needed; -1: there is none."""
        while (start := self._gap(length)) < 0 and self._unheld:
            self._drop(next(iter(self._unheld)))
        return start

    def _gap(self, length: int) -> int:
        at = 0
        for used in sorted(self._ranges.values(), key=lambda r: r.start):
            if used.start - at >= length:
                return at
            at = used.start + used.length
        return at if self.rows - at >= length else -1

    def _drop(self, hash: str) -> None:
        del self._ranges[hash]
        self._unheld.pop(hash, None)


def check_items(request: EngineRequest, taken: InputSpec | None, longest: int) -> None:
    """Raise ConfigError for an encoded input that the encoder cannot take.

    taken: the encoder's input for an item's data, with one row for each token; None for a model without an encoder.
    longest: rows of one run at most.
    """
    for number, item in enumerate(request.items):
        name = f"request {request.id}: items[{number}]"
        if taken is None:
            raise ConfigError(f"{name} is an encoded input: the model has no encoder; leave it out")
        rows, *rest = item.shape or (0,)
        if item.dtype != taken.dtype or tuple(rest) != taken.shape[1:]:
            wanted = ", ".join(map(str, ("rows", *taken.shape[1:])))
            raise ConfigError(f"{name} is {item.dtype or 'nothing'} {item.shape}; give {taken.dtype} ({wanted})")
        if len(item.data) != math.prod(item.shape) * np.dtype(item.dtype).itemsize:
            raise ConfigError(f"{name} has {len(item.data)} bytes, which are not {item.dtype} {item.shape}")
        if not 1 <= item.length <= rows <= longest:
            raise ConfigError(
                f"{name} has {rows} rows and makes {item.length}: it must make one at least and no more than it has, "
                f"and the encoder takes {longest} at a time"
            )
        if item.position < -1 or item.position + item.length > len(request.prompt):
            raise ConfigError(
                f"{name} stands in for {item.length} tokens from {item.position} on; the prompt has "
                f"{len(request.prompt)}"
            )
