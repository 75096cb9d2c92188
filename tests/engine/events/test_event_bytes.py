"""The bytes of batches: as vLLM's publisher writes them, field by field."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import msgspec
import pytest

from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.events.event_encoder import EventEncoder, described
from graphllm.engine.events.records import Batch, Cleared, Record, Removed, Stored
from graphllm.engine.requests.request import Adapter, EngineRequest, Item
from graphllm.program.schema import CacheGroup, CacheLayout

GROUPS = described(CacheLayout((CacheGroup("full", 0, 2), CacheGroup("window", 6, 4)), 9, recurrent=True), 4)
A, B = (hashlib.sha256(text).digest() for text in (b"a", b"b"))


def _request(**fields: Any) -> EngineRequest:
    return EngineRequest(id="x", prompt=[1], params=SamplingParams(), stop_ids=[], limit=1, seed=0, **fields)


def _bytes(*records: Record, rank: int = 0) -> bytes:
    return EventEncoder(GROUPS, rank).encode(Batch(7, 1.5, list(records)))


def _text(word: str) -> bytes:
    """Of at most 31 bytes."""
    return bytes([0xA0 + len(word)]) + word.encode()


def _hash(digest: bytes) -> bytes:
    """Both begin with more than 32 bits."""
    return b"\xcf" + digest[-8:]


def test_a_batch_by_hand() -> None:
    stored = Stored(0, [A, B], "GPU", None, 0, [5, 128, 256, 70_000], _request())
    wanted = b"\x93" + b"\xcb" + struct.pack(">d", 1.5) + b"\x93"
    wanted += b"\x8b" + _text("type") + _text("BlockStored")
    wanted += _text("block_hashes") + b"\x92" + _hash(A) + _hash(B)
    wanted += _text("parent_block_hash") + b"\xc0"
    wanted += _text("token_ids") + b"\x94\x05\xcc\x80\xcd\x01\x00\xce\x00\x01\x11\x70"
    wanted += _text("block_size") + b"\x02" + _text("lora_id") + b"\xc0"
    wanted += _text("medium") + _text("GPU") + _text("lora_name") + b"\xc0"
    wanted += _text("extra_keys") + b"\x92\xc0\xc0" + _text("group_idx") + b"\x00"
    wanted += _text("kv_cache_spec_kind") + _text("full_attention")
    wanted += b"\x84" + _text("type") + _text("BlockRemoved") + _text("block_hashes") + b"\x91" + _hash(B)
    wanted += _text("medium") + _text("GPU") + _text("group_idx") + b"\x01"
    wanted += b"\x81" + _text("type") + _text("AllBlocksCleared") + b"\x03"
    assert _bytes(stored, Removed(1, [B], "GPU"), Cleared(), rank=3) == wanted


def test_the_names_and_their_order_are_those_of_a_vllm_server() -> None:
    """What one of version 0.26 sends, decoded."""
    tokens = [151644, 872, 198, 9064]
    stored = Stored(0, [A, B], "GPU", None, 0, tokens, _request())
    assert msgspec.msgpack.decode(_bytes(stored)) == [1.5, [{
        "type": "BlockStored", "block_hashes": [int.from_bytes(d, "big") & (2**64 - 1) for d in (A, B)],
        "parent_block_hash": None, "token_ids": tokens, "block_size": 2, "lora_id": None, "medium": "GPU",
        "lora_name": None, "extra_keys": [None, None], "group_idx": 0, "kv_cache_spec_kind": "full_attention",
    }], 0]  # fmt: skip


@pytest.mark.parametrize(
    ("group", "kind", "window", "size"),
    [(0, "full_attention", None, 2), (1, "sliding_window", 6, 4), (2, "mamba", None, 4)],
)
def test_groups(group: int, kind: str, window: int | None, size: int) -> None:
    event = msgspec.msgpack.decode(_bytes(Stored(group, [B], "GPU", A, size, [1] * size, _request())))[1][0]
    assert (event["group_idx"], event["kv_cache_spec_kind"], event["block_size"]) == (group, kind, size)
    assert event.get("kv_cache_spec_sliding_window") == window
    assert event["parent_block_hash"] == int.from_bytes(A[-8:], "big")


def test_what_a_hash_depends_on_besides_tokens() -> None:
    items = [Item(content_hash=h, position=p, length=n) for h, p, n in (("seen", -1, 9), ("photo", 3, 4))]
    request = _request(adapter=Adapter("sql", "", "digest"), cache_salt="salt", items=items)
    event = msgspec.msgpack.decode(_bytes(Stored(0, [A, B] * 2, "GPU", None, 0, [0] * 8, request)))[1][0]
    assert event["lora_name"] == "sql"
    assert event["extra_keys"] == [
        ["sql", ["seen", -1], "salt"], ["sql", ["photo", 1]], ["sql", ["photo", -1]], ["sql", ["photo", -3]],
    ]  # fmt: skip


def test_other_tiers_give_hashes_alone() -> None:
    stored, removed = msgspec.msgpack.decode(_bytes(Stored(0, [A], "CPU"), Removed(0, [A], "STORAGE")))[1]
    assert (stored["medium"], stored["token_ids"], stored["locality"]) == ("CPU", [], "LOCAL")
    assert "extra_keys" not in stored
    assert (removed["medium"], removed["locality"]) == ("STORAGE", "LOCAL")
