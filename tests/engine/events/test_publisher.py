"""The sockets: numbers, replays, subscribers that come late or do not read, and a queue that is full."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import zmq

from graphllm.config import ConfigError
from graphllm.config.cache.kv_events import KVEventsConfig
from graphllm.engine.events.records import Batch, Cleared
from graphllm.engine.events.zmq_publisher import ZmqPublisher
from tests.engine.events.wire import PATIENCE, Message, receive, replay, subscribe
from tests.waiting import until

_NAMES = itertools.count()


def _payload(batch: Batch) -> bytes:
    return f"batch {batch.number}".encode()


def _publisher(encode: Callable[[Batch], bytes] = _payload, **fields: Any) -> ZmqPublisher:
    name = f"inproc://publisher-{next(_NAMES)}"
    given = {"enable_kv_cache_events": True, "endpoint": name, "replay_endpoint": f"{name}-replay"} | fields
    return ZmqPublisher(KVEventsConfig.read(given), encode)


def _numbered(publisher: ZmqPublisher, first: int = 0) -> list[int]:
    """The numbers of what is kept, once all batches have been through the thread."""
    endpoint, last = publisher.config.replay_endpoint or "", publisher.batches - publisher.dropped
    until(lambda: len(replay(endpoint, 0)) == min(last, publisher.config.buffer_steps))
    return [message.number for message in replay(endpoint, first)]


@pytest.mark.parametrize("addresses", [{}, {"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}])
def test_live_messages(addresses: dict[str, str]) -> None:
    """What a subscriber gets is a run of consecutive messages, each of three frames."""
    publisher = _publisher(topic="kv@pod@model", **addresses)
    with subscribe(publisher.config.endpoint, b"kv@") as live, subscribe(publisher.config.endpoint, b"other") as other:

        def heard() -> bool:
            publisher.publish([Cleared()])
            return bool(live.poll(10))

        until(heard)
        for _ in range(3):
            publisher.publish([Cleared()])
        first = Message.of(receive(live))
        found = [first, *(Message.of(receive(live)) for _ in range(publisher.batches - 1 - first.number))]
        assert found == [
            (b"kv@pod@model", number, b"batch %d" % number) for number in range(first.number, publisher.batches)
        ]
        assert not other.poll(0)
    assert replay(publisher.config.replay_endpoint or "", 0)[first.number :] == found
    publisher.close()


def test_a_late_subscriber_sees_every_batch_once() -> None:
    """It listens, asks for all from 0 on, and leaves out what it has had."""
    publisher = _publisher()
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            publisher.publish([Cleared()])
            done.wait(0.0005)

    working = threading.Thread(target=work)
    working.start()
    until(lambda: publisher.batches > 50)
    with subscribe(publisher.config.endpoint) as live:
        first = Message.of(receive(live))  # now it is known
        before = replay(publisher.config.replay_endpoint or "", 0)
        done.set()
        working.join()
        found = [m.number for m in before]
        message = first
        while found[-1] < publisher.batches - 1:
            if message.number > found[-1]:
                found.append(message.number)
            if found[-1] < publisher.batches - 1:
                message = Message.of(receive(live))
    assert found == list(range(publisher.batches))
    publisher.close()


def test_replay_from_a_number_on() -> None:
    publisher = _publisher(buffer_steps=5)
    for _ in range(8):
        publisher.publish([Cleared()])
    assert _numbered(publisher) == [3, 4, 5, 6, 7]
    assert _numbered(publisher, 6) == [6, 7]
    assert _numbered(publisher, 8) == []
    publisher.close()


def test_a_long_replay_arrives_whole() -> None:
    publisher = _publisher()
    for _ in range(3000):  # more than ZeroMQ keeps for a peer by itself
        publisher.publish([Cleared()])
    assert _numbered(publisher) == list(range(3000))
    publisher.close()


def test_requests_that_are_none_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    publisher = _publisher()
    publisher.publish([Cleared()])
    with zmq.Context.instance().socket(zmq.DEALER) as asking:
        asking.set(zmq.LINGER, 0)
        asking.connect(publisher.config.replay_endpoint or "")
        for frames in ([b""], [b"", b"12345"], [b"", b"1" * 8, b""]):
            asking.send_multipart(frames)
    assert _numbered(publisher) == [0]
    until(lambda: caplog.text.count("ignored") == 3)
    publisher.close()


def test_who_does_not_read_slows_nobody() -> None:
    """Only that subscriber misses batches; they are sent to others, and kept."""
    publisher = _publisher(endpoint="tcp://*:0", hwm=1)
    with zmq.Context.instance().socket(zmq.SUB) as asleep:
        asleep.set(zmq.RCVHWM, 1)
        asleep.setsockopt(zmq.SUBSCRIBE, b"")
        asleep.connect(publisher.config.endpoint)

        def known() -> bool:
            publisher.publish([Cleared()])
            return bool(asleep.poll(10))

        until(known)
        for _ in range(500):
            publisher.publish([Cleared()])
        assert _numbered(publisher) == list(range(publisher.batches))
        assert publisher.dropped == 0
    publisher.close()


def test_a_full_queue_drops_batches_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    begun, go = threading.Event(), threading.Event()

    def encode(batch: Batch) -> bytes:
        begun.set()
        assert go.wait(PATIENCE / 1000)
        return _payload(batch)

    publisher = _publisher(encode, max_queue_size=2)
    publisher.publish([Cleared()])
    assert begun.wait(PATIENCE / 1000)
    for _ in range(6):  # the thread has the first; two wait; four are too many
        publisher.publish([Cleared()])
    go.set()
    assert _numbered(publisher) == [0, 1, 2]
    publisher.publish([Cleared()])
    assert _numbered(publisher) == [0, 1, 2, 7]
    assert (publisher.batches, publisher.dropped) == (8, 4)
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "kv_events_config.max_queue_size is 2, and batch 3 is dropped" in caplog.text
    publisher.close()


def test_what_waits_is_sent_at_the_end() -> None:
    sent: list[int] = []

    def encode(batch: Batch) -> bytes:
        sent.append(batch.number)
        return _payload(batch)

    publisher = _publisher(encode)
    for _ in range(100):
        publisher.publish([Cleared()])
    publisher.close()
    assert sent == list(range(100))


def test_it_connects_to_who_waits_for_events() -> None:
    with zmq.Context.instance().socket(zmq.SUB) as router:
        router.setsockopt(zmq.SUBSCRIBE, b"")
        port = router.bind_to_random_port("tcp://127.0.0.1")
        publisher = _publisher(endpoint=f"tcp://127.0.0.1:{port}")

        def heard() -> bool:
            publisher.publish([Cleared()])
            return bool(router.poll(10))

        until(heard)
        publisher.close()


@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
def test_an_address_that_is_taken(name: str) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        address = f"tcp://*:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"kv_events_config\.{name} is '.*': .*in use; give an address that is"):
            _publisher(**{name: address})
