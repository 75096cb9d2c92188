"""Two engine cores of one host: one computes prompts, the other goes on with them, and texts are those of one core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphllm.config import TierConfig
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.core import EngineCore
from tests.engine.harness import finish, open_core, request

MIB = 1 << 20


def transfer(folder: Path, role: str, **more: Any) -> TierConfig:
    """Settings of an engine. folder: where it meets others."""
    extra = {"folder": str(folder), **more.pop("extra", {})}
    config = {"kv_connector": "HostConnector", "kv_role": role, "kv_connector_extra_config": extra, **more}
    return TierConfig(4 * MIB, kv_transfer_config=config)


def asking(limit: int, **params: Any) -> SamplingParams:
    """Greedy, with kv_transfer_params."""
    return SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True, extra_args={"kv_transfer_params": params})


def prefilled(core: EngineCore, id: str, prompt: list[int]) -> dict[str, Any]:
    """The params that an engine answers which has computed a prompt for another one."""
    core.add(request(id, prompt, asking(1, do_remote_decode=True)))
    found: dict[str, Any] | None = None
    while core.unfinished:
        for update in core.step():
            found = update.kv_transfer_params or found
    assert found is not None
    return found


def test_texts(checkpoint: Path, eager_artifact: Path, tmp_path: Path) -> None:
    prompt = [(7 * i) % 89 + 1 for i in range(45)]
    alone = open_core(checkpoint, eager_artifact)
    expected = finish(alone, [request("a", prompt)])["a"].tokens
    alone.close()
    first = open_core(checkpoint, eager_artifact, tiers=transfer(tmp_path, "kv_producer"))
    second = open_core(checkpoint, eager_artifact, tiers=transfer(tmp_path, "kv_consumer"))
    params = prefilled(first, "p", prompt)
    assert params["do_remote_prefill"] and not params["do_remote_decode"]
    found = finish(second, [request("d", prompt, asking(24, **params))])["d"]
    assert found.tokens == expected
    print(found.cached, second.stats().tiers, first.stats().tiers)
    first.close()
    second.close()
