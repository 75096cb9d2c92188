"""Engines in processes of their own: one that is killed at random moments, and engines of two ranks."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from graphllm import LLM
from tests.artifacts import LIMITS
from tests.engine.transfer.engines import asking, transfer_config

pytestmark = pytest.mark.thorough
PROMPTS = [[(k * i) % 89 + 1 for i in range(60)] for k in (3, 5, 7, 11, 13, 17)]


class Producer:
    """An engine for prompts."""

    def __init__(self, settings: dict[str, Any]) -> None:
        words = [sys.executable, "-m", "tests.engine.transfer.producer", json.dumps(settings)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[3],
        )
        assert self._read() == "ready"

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def prefilled(self, prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
        """The kv_transfer_params of each."""
        assert self.process.stdin is not None
        found = []
        for prompt in prompts:
            self.process.stdin.write(json.dumps(prompt) + "\n")
            self.process.stdin.flush()
            found.append(json.loads(self._read()))
        return found

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()


@pytest.fixture
def settings(checkpoint: Path) -> dict[str, Any]:
    """Of every engine here."""
    return {"model": str(checkpoint), "target": "cpu", "backend": "eager", "dtype": "float32",
            "kv_offloading_size": "4MiB", **LIMITS}  # fmt: skip


@pytest.fixture
def expected(settings: dict[str, Any]) -> list[list[int]]:
    """What an engine of its own says."""
    with LLM(**{**settings, "kv_offloading_size": 0}) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], asking(12))
    return [list(output.outputs[0].token_ids) for output in outputs]


def run(llm: LLM, given: Sequence[dict[str, Any]]) -> tuple[list[list[int]], list[int]]:
    """The texts of all prompts, and how many tokens of each were not computed."""
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], [asking(12, **params) for params in given])
    return [list(o.outputs[0].token_ids) for o in outputs], [o.num_cached_tokens or 0 for o in outputs]


def test_kills(settings: dict[str, Any], expected: list[list[int]], tmp_path: Path) -> None:
    """The texts are right whenever the producer is killed, and no socket or file is left in the way."""
    draw = random.Random(5)
    consumer = {**settings, "kv_transfer_config": transfer_config(tmp_path, "kv_consumer")}
    producer = {**settings, "kv_transfer_config": transfer_config(tmp_path, "kv_producer", engine_id="same")}
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


def test_two_ranks(settings: dict[str, Any], expected: list[list[int]], tmp_path: Path) -> None:
    """Each rank copies its part. An engine of one rank gets nothing of it."""
    both = {**settings, "tensor_parallel_size": 2}
    first = Producer({**both, "kv_transfer_config": transfer_config(tmp_path, "kv_producer")})
    with LLM(**both, kv_transfer_config=transfer_config(tmp_path, "kv_consumer")) as llm:
        found, cached = run(llm, first.prefilled(PROMPTS))
        assert found == expected
        assert cached == [56] * len(PROMPTS)
    with LLM(**settings, kv_transfer_config=transfer_config(tmp_path, "kv_consumer")) as llm:
        found, cached = run(llm, first.prefilled(PROMPTS))
        assert found == expected
        assert max(cached) < 56
    first.kill()
