"""Engines in processes of their own: one that is killed at random moments, and engines of two ranks."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphllm import LLM
from graphllm.engine.transfer import network_connectors
from tests.artifacts import LIMITS
from tests.engine.transfer.engines import asking, transfer_config
from tests.engine.transfer.processes import PROMPTS, Producer, run

pytestmark = pytest.mark.thorough
Configured = Callable[..., dict[str, Any]]


@pytest.fixture(params=["HostConnector", "NixlConnector", "MooncakeConnector"])
def configured(request: pytest.FixtureRequest, tmp_path: Path) -> Configured:
    """configured(role, **more): the setting kv_transfer_config with each connector whose library is installed."""
    if request.param == "HostConnector":
        return lambda role, **more: transfer_config(tmp_path, role, **more)
    module = network_connectors.__name__
    library = getattr(network_connectors, request.param).library
    pytest.importorskip(library, exc_type=ImportError)
    extra = {"mooncake_protocol": "tcp"} if request.param == "MooncakeConnector" else {}
    return lambda role, **more: {
        "kv_connector": request.param,
        "kv_connector_module_path": module,
        "kv_role": role,
        "kv_port": 0,
        "kv_connector_extra_config": extra,
        **more,
    }


@pytest.fixture
def settings(checkpoint: Path) -> dict[str, Any]:
    """Of every engine here."""
    return {"model": str(checkpoint), "target": "cpu", "backend": "eager", "dtype": "float32",
            "kv_offloading_size": "4MiB", "cache_secret": "of both", **LIMITS}  # fmt: skip


@pytest.fixture
def expected(settings: dict[str, Any]) -> list[list[int]]:
    """What an engine of its own says."""
    with LLM(**{**settings, "kv_offloading_size": 0}) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], asking(12))
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_kills(settings: dict[str, Any], expected: list[list[int]], configured: Configured) -> None:
    """The texts are right whenever the producer is killed, and no socket or file is left in the way."""
    draw = random.Random(5)
    consumer = {**settings, "kv_transfer_config": configured("kv_consumer")}
    producer = {**settings, "kv_transfer_config": configured("kv_producer", engine_id="same")}
    with LLM(**consumer) as llm:
        for _ in range(8):
            llm.reset_prefix_cache()
            first = Producer(producer)
            params = first.prefilled(PROMPTS)
            assert {p["remote_engine_id"] for p in params} == {"same"}
            killer = threading.Timer(draw.choice((0.0, 0.002, 0.01, 0.03)), first.kill)
            killer.start()
            found, _ = run(llm, params)
            killer.join()
            assert found == expected
        first = Producer(producer)
        llm.reset_prefix_cache()
        found, cached = run(llm, first.prefilled(PROMPTS))
        first.kill()
        assert found == expected
        assert cached == [56] * len(PROMPTS)


def test_two_ranks(settings: dict[str, Any], expected: list[list[int]], configured: Configured) -> None:
    """Each rank copies its part. An engine of one rank gets nothing of it."""
    both = {**settings, "tensor_parallel_size": 2}
    first = Producer({**both, "kv_transfer_config": configured("kv_producer")})
    with LLM(**both, kv_transfer_config=configured("kv_consumer")) as llm:
        found, cached = run(llm, first.prefilled(PROMPTS))
        assert found == expected
        assert cached == [56] * len(PROMPTS)
    with LLM(**settings, kv_transfer_config=configured("kv_consumer")) as llm:
        found, cached = run(llm, first.prefilled(PROMPTS))
        assert found == expected
        assert max(cached) < 56
    first.kill()
