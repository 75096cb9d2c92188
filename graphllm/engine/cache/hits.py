"""Beginnings of sequences that are in the cache: what one gives a request, and how long it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Retained(Protocol):
    """What is kept of sequences; see `graphllm.engine.cache.retention`. unit: tokens of an entry."""

    @property
    def unit(self) -> int: ...

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """Entries by their digests, 0 for a missing one; the list may end where nothing later can be used."""
        ...

    def usable(self, found: Sequence[int], num_tokens: int) -> int:
        """The longest beginning of up to ``num_tokens`` tokens that these entries serve, in tokens."""
        ...


class Hit(NamedTuple):
    """The cached prefix of a sequence.

    num_tokens: its tokens.
    blocks: of each group, 0 for blocks that the window has left.
    snapshot: of the recurrent states at its end, -1 for none.
    shared: another request writes the last block.
    without_state: tokens after these that have their blocks, and would be part of the hit if there were a snapshot.
    branch: where a snapshot is worth taking, because another request found none there, either; 0 for nowhere.
    """

    num_tokens: int
    blocks: list[list[int]]
    snapshot: int = -1
    shared: bool = False
    without_state: int = 0
    branch: int = 0


class Cached(NamedTuple):
    """A beginning of ``num_tokens`` tokens, and the entries found: of each retention, maybe for more tokens."""

    num_tokens: int
    entries: list[list[int]]


def cached(retentions: Sequence[Retained], digests: list[bytes], end: int, size: int, boundary: int) -> Cached:
    """The longest beginning of at most ``end`` tokens that all of these serve, a multiple of ``boundary``.

    digests: of blocks of ``size`` tokens.
    """
    found = [r.find(digests[r.unit // size - 1 : end // size : r.unit // size]) for r in retentions]
    while end:
        usable = min(r.usable(f, end) for r, f in zip(retentions, found, strict=True))
        usable -= usable % boundary
        if usable == end:
            break
        end = usable
    return Cached(end, found)
