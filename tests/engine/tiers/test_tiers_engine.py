"""An engine core whose pool is so small that blocks travel to host memory and back: texts are those of a large pool."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from graphllm.config import TierConfig
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.core import EngineCore
from tests.engine.harness import finish, open_core, request

MIB = 1 << 20


def conversations(seed: int, count: int, turns: int) -> list[list[list[int]]]:
    """What is new in each turn of each conversation; all begin alike."""
    random = np.random.default_rng(seed)
    common = random.integers(1, 90, 16).tolist()
    return [
        [
            (common if turn == 0 else []) + random.integers(1, 90, random.integers(3, 14)).tolist()
            for turn in range(turns)
        ]
        for _ in range(count)
    ]


def run(core: EngineCore, talks: list[list[list[int]]], at_once: int = 4) -> tuple[list[list[int]], int]:
    """The texts of all turns, and how many tokens came from the cache. Turns of all conversations alternate."""
    histories: list[list[int]] = [[] for _ in talks]
    found, cached = [], 0
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for turn in range(len(talks[0])):
        for first in range(0, len(talks), at_once):
            several = range(first, min(first + at_once, len(talks)))
            for i in several:
                histories[i] += talks[i][turn]
            results = finish(core, [request(f"{turn}-{i}", histories[i], params) for i in several])
            for i in several:
                result = results[f"{turn}-{i}"]
                assert result.error is None
                found.append(result.tokens)
                cached += result.cached
                histories[i] += result.tokens
    return found, cached


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_texts(checkpoint: Path, eager_artifact: Path, policy: str) -> None:
    talks = conversations(1, 8, 3)
    large = open_core(checkpoint, eager_artifact, 400)
    expected, all_cached = run(large, talks)
    large.close()
    small = open_core(checkpoint, eager_artifact, 16)
    _, few_cached = run(small, talks)
    small.close()
    core = open_core(checkpoint, eager_artifact, 16, tiers=TierConfig(4 * MIB, policy))
    found, cached = run(core, talks)
    assert found == expected
    print(all_cached, few_cached, cached, core.stats().tiers)
    core.close()
