"""Engines that exchange blocks: their settings, and what they ask of each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graphllm.config import TierConfig
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.core import EngineCore
from tests.engine.harness import request


def transfer_config(folder: Path, role: str, extra: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """The setting kv_transfer_config. folder: where engines meet."""
    inside = {"folder": str(folder), **(extra or {})}
    return {"kv_connector": "HostConnector", "kv_role": role, "kv_connector_extra_config": inside, **more}


def transfer(folder: Path, role: str, size: int = 4 << 20, **more: Any) -> TierConfig:
    """Settings of an engine. size: of its host memory, in bytes."""
    return TierConfig(size, kv_transfer_config=transfer_config(folder, role, **more))


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


def cached_tokens(core: EngineCore) -> int:
    """Tokens of prompts that were not computed."""
    return core.stats().cached_tokens
