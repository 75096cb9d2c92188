"""kv_events_config: what it means, mistakes in it, and the addresses of several engine cores."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from graphllm.config import ConfigError, EngineArgs
from graphllm.config.cache.kv_events import KVEventsConfig, binds


def test_defaults_are_those_of_vllm() -> None:
    assert dataclasses.asdict(KVEventsConfig.read({"enable_kv_cache_events": True})) == {
        "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": None,
        "buffer_steps": 10_000, "hwm": 100_000, "max_queue_size": 100_000, "topic": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "enabled"),
    [
        (None, False), ({}, False), ({"publisher": "zmq"}, False), ({"enable_kv_cache_events": True}, True),
        ({"enable_kv_cache_events": True, "publisher": None}, True),
        ({"enable_kv_cache_events": True, "publisher": "null"}, False),
    ],
)  # fmt: skip
def test_when_it_is_on(given: dict[str, Any] | None, enabled: bool) -> None:
    assert KVEventsConfig.read(given).enabled is enabled
    assert EngineArgs(kv_events_config=given).kv_events_config == given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("tcp://*:5557", "kv_events_config is 'tcp://*:5557': give a JSON object"),
        (["zmq"], "kv_events_config is ['zmq']: give a dict, or a JSON object"),
        ({"port": 5557}, ".port is 5557: there are enable_kv_cache_events, publisher, endpoint, "),
        ({"enable_kv_cache_events": "yes"}, ".enable_kv_cache_events is 'yes': give true or false"),
        ({"publisher": "nats"}, ".publisher is 'nats': use zmq or null"),
        ({"topic": 5}, ".topic is 5: give a text"),
        ({"hwm": -1}, ".hwm is -1: give a whole number of batches, 0 for no limit"),
        ({"hwm": True}, ".hwm is True: give a whole number"),
        ({"buffer_steps": 1.5}, ".buffer_steps is 1.5: give a whole number"),
        ({"max_queue_size": 0}, ".max_queue_size is 0: give a whole number of batches, at least 1"),
        ({"endpoint": "*:5557"}, ".endpoint is '*:5557': give tcp://*:PORT (0 for any), "),
        ({"endpoint": "tcp://*"}, ".endpoint is 'tcp://*': give tcp://*:PORT"),
        ({"endpoint": "tcp://*:70000"}, ".endpoint is 'tcp://*:70000': give tcp://*:PORT"),
        ({"replay_endpoint": "udp://*:1"}, ".replay_endpoint is 'udp://*:1': give tcp://*:PORT"),
        ({"replay_endpoint": "tcp://*:5557"}, ".replay_endpoint is 'tcp://*:5557': events are published there; give"),
    ],
)
def test_mistakes(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        EngineArgs(kv_events_config=given)


@pytest.mark.parametrize(
    ("endpoint", "of_rank_2", "binding"),
    [
        ("tcp://*:5557", "tcp://*:5559", True), ("tcp://*:0", "tcp://*:0", True),
        ("tcp://[::]:5557", "tcp://[::]:5559", True), ("tcp://router:5557", "tcp://router:5559", False),
        ("inproc://here", "inproc://here_dp2", True),
    ],
)  # fmt: skip
def test_addresses_of_engine_cores(endpoint: str, of_rank_2: str, binding: bool) -> None:
    config = KVEventsConfig.read({"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": "tcp://*:9"})
    assert config.of_rank(0) == config
    assert (config.of_rank(2).endpoint, config.of_rank(2).replay_endpoint) == (of_rank_2, "tcp://*:11")
    assert binds(endpoint) is binding


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"endpoint": "ipc:///tmp/x"}, ".endpoint is 'ipc:///tmp/x': data_parallel_size is 4, and only tcp and inproc"),
        (
            {"replay_endpoint": "tcp://*:5560"},
            ".replay_endpoint is 'tcp://*:5560': 4 engine cores publish on the ports",
        ),
        ({"endpoint": "tcp://*:65533"}, ".endpoint is 'tcp://*:65533': 4 engine cores have the ports from there on; "),
    ],
)
def test_what_several_engine_cores_cannot_share(given: dict[str, Any], message: str) -> None:
    config = {"enable_kv_cache_events": True, **given}
    EngineArgs(kv_events_config=config)
    with pytest.raises(ConfigError, match=re.escape(f"kv_events_config{message}")):
        EngineArgs(kv_events_config=config, data_parallel_size=4)


@pytest.mark.parametrize(
    "given",
    [{"replay_endpoint": "tcp://*:5561"}, {"endpoint": "tcp://router:5557", "replay_endpoint": "tcp://*:5557"},
     {"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}],
)  # fmt: skip
def test_what_they_can_share(given: dict[str, Any]) -> None:
    EngineArgs(kv_events_config={"enable_kv_cache_events": True, **given}, data_parallel_size=4)
