"""KVEventsConfig: whether and where an engine publishes what its prefix cache holds, with vLLM's names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

from graphllm.config.errors import ConfigError

_NAME = "kv_events_config"
_TCP = re.compile(r"tcp://([^/\s]+):(\d{1,5})")
_OTHER = re.compile(r"(ipc|inproc)://\S+")
_RULES: Mapping[str, tuple[type, int, str]] = {
    "enable_kv_cache_events": (bool, 0, "give true or false"),
    "topic": (str, 0, "give a text"),
    "buffer_steps": (int, 0, "give a whole number of batches, 0 for none"),
    "hwm": (int, 0, "give a whole number of batches, 0 for no limit"),
    "max_queue_size": (int, 1, "give a whole number of batches, at least 1"),
}


@dataclasses.dataclass(frozen=True)
class KVEventsConfig:
    """Where an engine core publishes the events of its cache.

    enable_kv_cache_events: whether it does.
    publisher: "zmq", or "null" for nothing.
    endpoint: of the PUB socket. It binds where there is a *, ::, ipc or inproc in it, and connects elsewhere.
    replay_endpoint: of the ROUTER socket that sends earlier batches again; None for none.
    buffer_steps: batches that are kept for it.
    hwm: batches that may wait for a slow subscriber; it misses what comes beyond.
    max_queue_size: batches that may wait for the publisher's thread; those beyond are dropped.
    topic: first frame of each message, which subscribers filter by.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] = "null"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @classmethod
    def read(cls, given: Mapping[str, Any] | None) -> KVEventsConfig:
        """From an object as users give it. Raises ConfigError for what it cannot be."""
        values = {name: value for name, value in (given or {}).items() if value is not None}
        known = [f.name for f in dataclasses.fields(cls)]
        for name, value in values.items():
            if name not in known:
                raise ConfigError(f"{_NAME}.{name!s:.80} is {value!r:.80}: there are {', '.join(known)}; leave it out")
            if name in _RULES:
                kind, least, remedy = _RULES[name]
                if type(value) is not kind or (isinstance(value, int) and value < least):
                    raise ConfigError(f"{_NAME}.{name} is {value!r:.80}: {remedy}")
            elif name == "publisher" and value not in ("zmq", "null"):
                raise ConfigError(f"{_NAME}.publisher is {value!r:.80}: use zmq or null")
            elif name.endswith("endpoint"):
                _check_endpoint(name, value)
        replay = values.get("replay_endpoint", "")
        if replay == values.get("endpoint", cls.endpoint) and not replay.endswith(":0"):
            raise ConfigError(
                f"{_NAME}.replay_endpoint is {replay!r:.80}: events are published there; give another port"
            )
        values.setdefault("publisher", "zmq" if values.get("enable_kv_cache_events") else "null")
        return cls(**values)

    @property
    def enabled(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"

    def check_ranks(self, ranks: int) -> None:
        """Raise ConfigError where so many engine cores cannot each have endpoints of their own."""
        if ranks == 1 or not self.enabled:
            return
        ports: dict[str, int] = {}
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if value is None:
                continue
            if value.startswith("ipc"):
                raise ConfigError(
                    f"{_NAME}.{name} is {value!r:.80}: data_parallel_size is {ranks}, and only tcp and inproc have an "
                    "address for each engine core; give tcp://*:5557"
                )
            port = _port(value)
            if port and port + ranks > 2**16:
                raise ConfigError(
                    f"{_NAME}.{name} is {value!r:.80}: {ranks} engine cores have the ports from there on; give at "
                    f"most {2**16 - ranks}"
                )
            if port and (name == "replay_endpoint" or binds(value)):
                ports[name] = port
        if len(ports) == 2 and abs(ports["endpoint"] - ports["replay_endpoint"]) < ranks:
            raise ConfigError(
                f"{_NAME}.replay_endpoint is {self.replay_endpoint!r:.80}: {ranks} engine cores publish on the ports "
                f"from {ports['endpoint']} on; give a port that is at least {ranks} away"
            )

    def of_rank(self, rank: int) -> KVEventsConfig:
        """With the endpoints of one engine core of several."""
        replay = None if self.replay_endpoint is None else _offset(self.replay_endpoint, rank)
        return dataclasses.replace(self, endpoint=_offset(self.endpoint, rank), replay_endpoint=replay)


def binds(endpoint: str) -> bool:
    """Whether the PUB socket waits for subscribers there; else it connects to one that waits."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _port(endpoint: str) -> int:
    """Of TCP; 0 where the system chooses it, or there is none."""
    found = _TCP.fullmatch(endpoint)
    return int(found[2]) if found else 0


def _offset(endpoint: str, rank: int) -> str:
    if rank == 0:
        return endpoint
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{rank}"
    port = _port(endpoint)
    return f"{endpoint.rpartition(':')[0]}:{port + rank}" if port else endpoint


def _check_endpoint(name: str, value: Any) -> None:
    if isinstance(value, str):
        found = _TCP.fullmatch(value)
        if (found and int(found[2]) < 2**16) or _OTHER.fullmatch(value):
            return
    raise ConfigError(
        f"{_NAME}.{name} is {value!r:.80}: give tcp://*:PORT (0 for any), ipc://PATH or inproc://NAME"
        + (", or tcp://HOST:PORT of one who waits for events" if name == "endpoint" else "")
    )
