"""The events as they are on the wire, in msgpack. The names, the order of fields and the encoding are vLLM's.

A batch is an array. Each event in it is a map: ``type`` has its name. Fields that have a default are left out where
they have no other value.
"""

from __future__ import annotations

from typing import Any

import msgspec

GPU = "GPU"  # what vLLM calls the device's own memory, whatever the device


class CacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Anything that happened."""


class BlockStored(CacheEvent):
    """Consecutive blocks of a sequence can be found now.

    block_hashes: of the blocks, in order.
    parent_block_hash: of the block before them; None at the beginning of a sequence.
    token_ids: of the blocks; empty where only the hashes are known.
    block_size: tokens of a block.
    lora_id: None; adapters have names here.
    medium: where the blocks lie: "GPU", "CPU", "STORAGE".
    lora_name: of the adapter.
    extra_keys: for each block, what its hash depends on besides tokens; None for nothing. It is the adapter's name,
        [content hash, place] of each input, and with the first block the request's salt.
    group_idx: the cache group.
    kv_cache_spec_kind: what the group keeps of a sequence.
    kv_cache_spec_sliding_window: its window, in tokens.
    locality: "LOCAL" for tiers of this machine.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(CacheEvent):
    """One copy of each of these blocks can be found no more."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(CacheEvent):
    """Nothing can be found any more."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What happened since the batch before, in order.

    ts: when the batch was made, in seconds since 1970.
    data_parallel_rank: number of the engine core.
    """

    ts: float
    events: list[CacheEvent]
    data_parallel_rank: int | None = None
