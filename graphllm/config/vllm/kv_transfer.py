"""KVTransferConfig: how an engine gives blocks of its cache to other engines, and takes theirs; vLLM's object of this
name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graphllm.config.errors import ConfigError

PARAMS = "kv_transfer_params"  # the field of requests and answers, and in `SamplingParams.extra_args`
PRODUCER, CONSUMER, BOTH = "kv_producer", "kv_consumer", "kv_both"
_POLICIES = ("recompute", "fail")
_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FIELDS: Mapping[str, tuple[type, str]] = {
    "kv_connector": (str, "the name of a connector, such as HostConnector"),
    "kv_role": (str, f"{PRODUCER}, {CONSUMER} or {BOTH}"),
    "engine_id": (str, "up to 64 letters, digits and . _ -"),
    "kv_connector_module_path": (str, "the module that the connector's class is in"),
    "kv_connector_extra_config": (dict, "an object"),
    "kv_load_failure_policy": (str, " or ".join(_POLICIES)),
    "kv_ip": (str, "an address"),
    "kv_port": (int, "a port"),
}
# Fields of vLLM's that say nothing here, and the values that they may have.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "kv_buffer_device": ("cpu", "cuda"),
    "kv_buffer_size": (),
    "kv_rank": (),
    "kv_parallel_size": (1, 2),
    "enable_permute_local_kv": (False,),
}
_ANY = ("kv_buffer_size", "kv_rank")


@dataclass(frozen=True)
class KVTransferConfig:
    """Of one engine.

    kv_connector: the connector's name.
    kv_role: whether this engine gives blocks (kv_producer), takes them (kv_consumer), or does both (kv_both).
    engine_id: by which other engines find it; "": it takes one of its own.
    kv_connector_module_path: the module of the connector's class; "": found by the name.
    kv_connector_extra_config: settings of the connector's own.
    kv_load_failure_policy: what becomes of a request whose blocks do not come: recompute computes them here, fail ends
        the request with an error.
    kv_ip, kv_port: for connectors that need an address.
    """

    kv_connector: str
    kv_role: str = BOTH
    engine_id: str = ""
    kv_connector_module_path: str = ""
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    kv_load_failure_policy: str = "recompute"
    kv_ip: str = "127.0.0.1"
    kv_port: int = 14579

    @property
    def is_producer(self) -> bool:
        """Whether it gives blocks to others."""
        return self.kv_role != CONSUMER

    @property
    def is_consumer(self) -> bool:
        """Whether it takes blocks of others."""
        return self.kv_role != PRODUCER


def read_kv_transfer(given: Mapping[str, Any] | None) -> KVTransferConfig | None:
    """The object as a user gives it; None where nothing is transferred. Raises ConfigError."""
    values = {name: value for name, value in (given or {}).items() if value is not None}
    for name, value in list(values.items()):
        if name in _NEUTRAL:
            if name not in _ANY and value not in _NEUTRAL[name]:
                raise _wrong(name, value, f"it says nothing here; give {_NEUTRAL[name][0]!r}, or leave it out")
            del values[name]
        elif name not in _FIELDS:
            raise _wrong(name, value, f"there is no such field; there are {', '.join([*_FIELDS, *_NEUTRAL])}")
        elif not isinstance(value, _FIELDS[name][0]) or isinstance(value, bool):
            raise _wrong(name, value, f"give {_FIELDS[name][1]}")
    if not values:
        return None
    if not values.get("kv_connector"):
        raise ConfigError(
            "kv_transfer_config has no kv_connector: name one, such as HostConnector, or leave kv_transfer_config out"
        )
    if "kv_role" not in values:
        raise ConfigError(f"kv_transfer_config has no kv_role: give {_FIELDS['kv_role'][1]}")
    found = KVTransferConfig(**values)
    if found.kv_role not in (PRODUCER, CONSUMER, BOTH):
        raise _wrong("kv_role", found.kv_role, f"give {_FIELDS['kv_role'][1]}")
    if found.kv_load_failure_policy not in _POLICIES:
        raise _wrong("kv_load_failure_policy", found.kv_load_failure_policy, f"give {' or '.join(_POLICIES)}")
    if found.engine_id and not _ID.fullmatch(found.engine_id):
        raise _wrong("engine_id", found.engine_id, f"give {_FIELDS['engine_id'][1]}")
    return found


def is_engine_id(text: object) -> bool:
    """Whether it can be the id of an engine."""
    return isinstance(text, str) and _ID.fullmatch(text) is not None


def _wrong(name: str, value: object, remedy: str) -> ConfigError:
    return ConfigError(f"kv_transfer_config: {name} is {value!r:.80}: {remedy}")
