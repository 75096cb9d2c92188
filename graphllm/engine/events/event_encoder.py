"""EventEncoder: from records of the cache to the bytes of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from graphllm.engine.events.records import Batch, Cleared, Record, Removed, Stored
from graphllm.engine.events.structs import GPU, AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, EventBatch
from graphllm.engine.requests.request import EngineRequest
from graphllm.program.schema import CacheLayout


class Group(NamedTuple):
    """A cache group as events describe it.

    kind: what it keeps, in vLLM's words.
    window: tokens; None without one.
    block_size: tokens of a block.
    """

    kind: str
    window: int | None
    block_size: int


def described(layout: CacheLayout, boundary: int) -> list[Group]:
    """The groups of a layout. Snapshots of recurrent states, one every ``boundary`` tokens, are one more."""
    found = [
        Group("sliding_window", g.window, g.block_size)
        if g.retention == "window"
        else Group("full_attention", None, g.block_size)
        for g in layout.groups
    ]
    return [*found, Group("mamba", None, boundary)] if layout.recurrent else found


class EventEncoder:
    """groups: by their number. rank: of the engine core."""

    def __init__(self, groups: Sequence[Group], rank: int) -> None:
        self._groups, self._rank = groups, rank
        self._encode = msgspec.msgpack.Encoder().encode

    def encode(self, batch: Batch) -> bytes:
        """The bytes of a batch."""
        return self._encode(EventBatch(batch.time, [self._event(r) for r in batch.records], self._rank))

    def _event(self, record: Record) -> CacheEvent:
        match record:
            case Stored():
                return self._stored(record)
            case Removed(group, digests, medium):
                return BlockRemoved([short(d) for d in digests], medium, group, _locality(medium))
            case Cleared():
                return AllBlocksCleared()

    def _stored(self, record: Stored) -> BlockStored:
        group, request, parent = self._groups[record.group], record.request, record.parent
        adapter = None if request is None else request.adapter
        size = group.block_size
        starts = range(record.start, record.start + size * len(record.digests), size)
        return BlockStored(
            block_hashes=[short(d) for d in record.digests],
            parent_block_hash=None if parent is None else short(parent),
            token_ids=list(record.tokens),
            block_size=size,
            lora_id=None,
            medium=record.medium,
            lora_name=None if adapter is None else adapter.name,
            extra_keys=None if request is None else [extra_keys(request, start, start + size) for start in starts],
            group_idx=record.group,
            kv_cache_spec_kind=group.kind,
            kv_cache_spec_sliding_window=group.window,
            locality=_locality(record.medium),
        )


def short(digest: bytes) -> int:
    """The hash that events have for a digest."""
    return int.from_bytes(digest[-8:], "big")


def extra_keys(request: EngineRequest, start: int, end: int) -> tuple[Any, ...] | None:
    """What the tokens at these positions depend on besides themselves."""
    found: list[Any] = [] if request.adapter is None else [request.adapter.name]
    for item in request.items:
        # An item that every token sees counts with the first block, as the salt does.
        first = max(item.position, 0)
        if first < end and (first + item.length > start if item.position >= 0 else start == 0):
            found.append((item.content_hash, item.position - start))
    if request.cache_salt and start == 0:
        found.append(request.cache_salt)
    return tuple(found) or None


def _locality(medium: str) -> str | None:
    return None if medium == GPU else "LOCAL"
