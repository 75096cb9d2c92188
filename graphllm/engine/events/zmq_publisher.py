"""ZmqPublisher: sends batches of cache events to subscribers, and earlier ones again to those who ask.

A message is three frames: the topic, the number of the batch (8 bytes, big-endian), its bytes. Two threads do it all. A
step only puts its batch into a queue and never waits: where the queue is full, the batch is dropped, and its number is
missing for subscribers to see. The other thread answers who asks for batches from a number on: it sends those that are
kept, and an end: an empty topic, the number -1, nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence

import zmq

from graphllm.config import ConfigError
from graphllm.config.cache.kv_events import KVEventsConfig, binds
from graphllm.engine.events.records import Batch, Record

_log = logging.getLogger(__name__)
_END = (-1).to_bytes(8, "big", signed=True)
_CLOSING = 1.0  # seconds that what waits in the queue may take at the end


class ZmqPublisher:
    """config: of this engine core. encode: makes the bytes of a batch, in the publisher's thread.

    config: has the addresses under which it is found, after the sockets are bound.
    batches, dropped: batches so far, and how many of them found the queue full.

    Raises ConfigError for an address that cannot be had.
    """

    def __init__(self, config: KVEventsConfig, encode: Callable[[Batch], bytes]) -> None:
        self._encode, self._topic = encode, config.topic.encode()
        self._most, self.batches, self.dropped = config.max_queue_size, 0, 0
        self._queue: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._kept: collections.deque[tuple[int, bytes]] = collections.deque(maxlen=config.buffer_steps)
        self._lock = threading.Lock()  # of what is kept
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()  # which subscribers by inproc share
        self._pub = context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._replay: zmq.Socket[bytes] | None = None
        endpoint, replay = config.endpoint, config.replay_endpoint
        try:
            endpoint = _open(self._pub, "endpoint", endpoint, binds(endpoint))
            if replay is not None:
                self._replay = context.socket(zmq.ROUTER)
                self._replay.set(zmq.SNDHWM, 0)  # one answer may be all that is kept
                replay = _open(self._replay, "replay_endpoint", replay, bind=True)
        except ConfigError:
            self._close_sockets()
            raise
        self.config = dataclasses.replace(config, endpoint=endpoint, replay_endpoint=replay)
        self._closing, self._close = os.pipe()
        self._threads = [threading.Thread(target=self._send_all, name="graphllm-kv-events", daemon=True)]
        if self._replay is not None:
            asked = threading.Thread(
                target=self._answer_all, args=(self._replay,), name="graphllm-kv-events-replay", daemon=True
            )
            self._threads.append(asked)
        for thread in self._threads:
            thread.start()

    def publish(self, records: list[Record]) -> None:
        """Send the records of a step, soon. Returns at once."""
        number, self.batches = self.batches, self.batches + 1
        if self._queue.qsize() >= self._most:
            self.dropped += 1
            if self.dropped == 1:
                _log.warning(
                    "cache events come faster than they are sent: kv_events_config.max_queue_size is %d, and batch %d "
                    "is dropped, maybe with others; subscribers see missing numbers", self._most, number,
                )  # fmt: skip
            return
        self._queue.put(Batch(number, time.time(), records))

    def close(self) -> None:
        """Send what waits, and end."""
        self._queue.put(None)
        self._threads[0].join(_CLOSING)
        os.close(self._close)
        for thread in self._threads[1:]:
            thread.join()
        os.close(self._closing)
        if not self._threads[0].is_alive():
            self._close_sockets()

    def _close_sockets(self) -> None:
        for one in (self._pub, self._replay):
            if one is not None:
                one.close(linger=0)

    # ---- in their threads

    def _send_all(self) -> None:
        while (batch := self._queue.get()) is not None:
            try:
                payload = self._encode(batch)
                with self._lock:  # first kept: who subscribes now, and asks then, misses none
                    self._kept.append((batch.number, payload))
                self._pub.send_multipart([self._topic, batch.number.to_bytes(8, "big"), payload])
            except Exception:
                _log.exception("batch %d of cache events cannot be sent", batch.number)

    def _answer_all(self, replay: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(replay, zmq.POLLIN)
        poller.register(self._closing, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._closing in ready:
                return
            try:
                self._answer(replay, replay.recv_multipart())
            except Exception:
                _log.exception("a request for earlier cache events cannot be answered")

    def _answer(self, replay: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
        """Send the kept batches from the number on that is asked for."""
        if len(frames) != 3 or len(frames[2]) != 8:
            _log.warning("kv_events_config.replay_endpoint: a request is an empty frame and one of 8 bytes; ignored")
            return
        who, empty, first = frames[0], frames[1], int.from_bytes(frames[2], "big")
        with self._lock:
            found = [one for one in self._kept if one[0] >= first]
        for number, payload in found:
            replay.send_multipart([who, empty, self._topic, number.to_bytes(8, "big"), payload])
        replay.send_multipart([who, empty, b"", _END, b""])


def _open(opened: zmq.Socket[bytes], name: str, endpoint: str, bind: bool) -> str:
    """Bind or connect a socket; the address under which others find it. Raises ConfigError."""
    try:
        if not bind:
            opened.connect(endpoint)
            return endpoint
        if "[" in endpoint or "::" in endpoint:
            opened.set(zmq.IPV6, 1)
        opened.bind(endpoint)
    except zmq.ZMQError as problem:
        why = zmq.strerror(problem.errno or 0)
        raise ConfigError(
            f"kv_events_config.{name} is {endpoint!r:.80}: {why}; give an address that is free here"
        ) from problem
    if not endpoint.endswith(":0"):
        return endpoint
    port = opened.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    return f"tcp://{_own_address() if host in ('*', '0.0.0.0') else host}:{port}"


def _own_address() -> str:
    """Of this machine, as others reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # sends nothing: it chooses the way
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
