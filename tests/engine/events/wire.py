"""The wire of cache events, from vLLM's description of it: its structs, a subscriber, and a model of the cache that is
kept by events alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import zmq

from graphllm.engine.core import EngineCore

PATIENCE = 20_000  # milliseconds until a message counts as lost


class BlockStored(msgspec.Struct, tag="BlockStored", forbid_unknown_fields=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", forbid_unknown_fields=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", forbid_unknown_fields=True):
    pass


class KVEventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


DECODE = msgspec.msgpack.Decoder(KVEventBatch).decode


class Message(NamedTuple):
    topic: bytes
    number: int
    payload: bytes

    @classmethod
    def of(cls, frames: list[bytes]) -> Message:
        topic, number, payload = frames
        assert len(number) == 8
        return cls(topic, int.from_bytes(number, "big"), payload)


def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    """The next message, which must come."""
    assert socket.poll(PATIENCE), "no message"
    return socket.recv_multipart()


def subscribe(endpoint: str, topic: bytes = b"") -> zmq.Socket[bytes]:
    """A subscriber; what it gets before it is known is anybody's guess."""
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, topic)
    socket.connect(endpoint)
    return socket


def replay(endpoint: str, first: int) -> list[Message]:
    """What the other socket sends again, from a number on, up to its end."""
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVHWM, 0)
        socket.connect(endpoint)
        socket.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while True:
            empty, *frames = receive(socket)
            assert empty == b""
            if frames == [b"", b"\xff" * 8, b""]:
                return found
            found.append(Message.of(frames))


class Block(NamedTuple):
    """What events say of a hash."""

    tokens: tuple[int, ...]
    parent: int | None
    extra: tuple[Any, ...] | None
    lora_name: str | None


class CacheModel:
    """A router's view of one core, which reads all that the core has published so far.

    held: (medium, group, hash) of what can be found.
    blocks: what is known of each (group, hash) that was ever stored.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core, self._next = core, 0
        self.held: set[tuple[str | None, int | None, int]] = set()
        self.blocks: dict[tuple[int | None, int], Block] = {}
        self.events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []

    def read(self) -> None:
        """Follow the core up to now."""
        stats = self._core.stats()
        while self._next < stats.kv_event_batches:
            for message in replay(stats.kv_events["replay_endpoint"], self._next):
                assert message.number == self._next
                self._next += 1
                batch = DECODE(message.payload)
                assert batch.events
                for event in batch.events:
                    self._apply(event)

    def _apply(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        self.events.append(event)
        match event:
            case AllBlocksCleared():
                self.held.clear()
            case BlockRemoved():
                for one in event.block_hashes:
                    self.held.remove((event.medium, event.group_idx, one))
            case BlockStored():
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert event.extra_keys is not None or not event.token_ids
        assert len(event.token_ids) in (0, size * len(event.block_hashes))
        for i, one in enumerate(event.block_hashes):
            key = (event.medium, event.group_idx, one)
            assert key not in self.held
            self.held.add(key)
            if event.token_ids:
                extra = event.extra_keys[i] if event.extra_keys else None
                tokens = tuple(event.token_ids[i * size : (i + 1) * size])
                self.blocks[event.group_idx, one] = Block(tokens, parent, extra and tuple(extra), event.lora_name)
            parent = one
