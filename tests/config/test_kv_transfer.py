"""The setting kv_transfer_config: vLLM's object, checked when it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from graphllm.config import ConfigError, EngineArgs, TierConfig
from graphllm.config.vllm.kv_transfer import KVTransferConfig, read_kv_transfer

LEAST = {"kv_connector": "HostConnector", "kv_role": "kv_both"}


@dataclass
class OfVllm:
    """As vLLM's own class, with defaults of its own."""

    kv_connector: str = "HostConnector"
    kv_role: str = "kv_producer"
    engine_id: str | None = None
    kv_buffer_device: str = "cuda"
    kv_buffer_size: float = 1e9
    kv_rank: int | None = None
    kv_parallel_size: int = 1


def test_forms() -> None:
    for given in ('{"kv_connector": "HostConnector", "kv_role": "kv_both"}', LEAST):
        assert EngineArgs(kv_transfer_config=given, kv_offloading_size=1).kv_transfer_config == LEAST
    found = EngineArgs(kv_transfer_config=OfVllm(), kv_offloading_size=1).kv_transfer_config  # type: ignore[arg-type]
    config = TierConfig(1, kv_transfer_config=found).transfer
    assert config == KVTransferConfig("HostConnector", "kv_producer")
    assert (config.is_producer, config.is_consumer) == (True, False)
    for nothing in (None, {}):
        assert TierConfig(kv_transfer_config=nothing).transfer is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"kv_role": "kv_both"}, "has no kv_connector: name one, such as HostConnector"),
        ({"kv_connector": "HostConnector"}, "has no kv_role: give kv_producer, kv_consumer or kv_both"),
        ({**LEAST, "kv_role": "both"}, "kv_role is 'both': give kv_producer, kv_consumer or kv_both"),
        ({**LEAST, "kv_load_failure_policy": "wait"}, "kv_load_failure_policy is 'wait': give recompute or fail"),
        ({**LEAST, "engine_id": "../x"}, "engine_id is '../x': give up to 64 letters"),
        ({**LEAST, "kv_port": "80"}, "kv_port is '80': give a port"),
        ({**LEAST, "kv_parallel_size": 5}, "kv_parallel_size is 5: it says nothing here"),
        ({**LEAST, "kv_size": 5}, "kv_size is 5: there is no such field"),
    ],
)
def test_mistakes(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^kv_transfer_config:? .*{says}|^kv_transfer_config {says}"):
        read_kv_transfer(given)


def test_host_memory_is_needed() -> None:
    with pytest.raises(ConfigError, match="blocks come and go by way of host memory; give kv_offloading_size, too"):
        EngineArgs(kv_transfer_config=LEAST)
