"""An engine core whose pool is so small that blocks travel to host memory and back: texts are those of a large pool."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from graphllm.config import ConfigError, TierConfig
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.core import EngineCore
from graphllm.engine.parts.tiers import Tiers
from graphllm.loading.checkpoint.source import open_source
from graphllm.program.artifact import Artifact
from tests.artifacts import LIMITS, artifact_of
from tests.engine.harness import finish, open_core, request
from tests.models import test_parity as parity
from tests.tiers import thorough

MIB = 1 << 20
Talks = list[list[list[int]]]


def conversations(seed: int, count: int, turns: int) -> Talks:
    """What is new in each turn of each conversation; all begin alike."""
    random = np.random.default_rng(seed)
    common = random.integers(1, 90, 16).tolist()
    return [
        [
            (common if not turn else []) + random.integers(1, 90, random.integers(3, 14)).tolist()
            for turn in range(turns)
        ]
        for _ in range(count)
    ]


def run(core: EngineCore, talks: Talks, at_once: int = 4) -> tuple[list[list[int]], int]:
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


def compare(
    folder: Path, place: Path, pages: int, policy: str = "lru", snapshots: tuple[int, int] | None = None
) -> None:
    """Texts over few pages with a tier are those over many, and nearly as much is found. snapshots: many and few."""
    talks = conversations(1, 8, 3)
    many, few = (None, None) if snapshots is None else snapshots
    cores = (
        open_core(folder, place, 400, snapshots=many),
        open_core(folder, place, pages, snapshots=few),
        open_core(folder, place, pages, snapshots=few, tiers=TierConfig(8 * MIB, policy)),  # type: ignore[arg-type]
    )
    (expected, most), (_, least), (found, cached) = (run(core, talks) for core in cores)
    assert found == expected
    assert least < 0.7 * most
    assert cached > 0.9 * most
    host = cores[-1].stats().tiers["host"]
    assert 0 < host.hit_tokens <= cached
    assert 0 < host.used_bytes <= host.stored_bytes
    for core in cores:
        core.close()


@pytest.mark.parametrize("policy", ["lru", thorough("arc")])
def test_texts(checkpoint: Path, eager_artifact: Path, policy: str) -> None:
    compare(checkpoint, eager_artifact, 16, policy)


def test_texts_without_torch(checkpoint: Path, prebuilt_artifact: Path) -> None:
    compare(checkpoint, prebuilt_artifact, 16)


@pytest.mark.parametrize(
    ("name", "pages", "snapshots"),
    [
        thorough("qwen3_next", 30, (40, 6)),
        thorough("mamba2", 16, (40, 6)),
        thorough("gemma3", 40, None),
        thorough("deepseek_v3", 16, None),
    ],
)
def test_texts_of_families(name: str, pages: int, snapshots: tuple[int, int] | None, tmp_path: Path) -> None:
    parity.saved_oracle(next(a for a in parity.ARCHS if a.name == name), tmp_path)
    place = artifact_of(open_source(tmp_path), backend="eager", dtype="float32", **LIMITS)
    compare(tmp_path, place, pages, snapshots=snapshots)


def test_a_preempted_request_finds_its_blocks_again(checkpoint: Path, eager_artifact: Path) -> None:
    """Three requests that do not fit together: who gives way is copied out, and computes little again."""
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    prompts = [[5 + i, *range(10, 40)] for i in range(3)]
    texts, tokens = [], []
    for tiers in (TierConfig(0), TierConfig(4 * MIB)):
        core = open_core(checkpoint, eager_artifact, 18, tiers=tiers)
        found = finish(core, [request(f"{i}", p, params) for i, p in enumerate(prompts)])
        texts.append([result.tokens for result in found.values()])
        stats = core.stats()
        assert stats.preemptions > 0
        tokens.append(sum(b.tokens for b in stats.buckets.values()))
        core.close()
    assert texts[0] == texts[1]
    least = sum(map(len, prompts)) + sum(map(len, texts[0])) - 3
    assert tokens[0] > least + 40
    assert tokens[1] <= least + 8 * (stats.preemptions + 1)


def test_a_reset_forgets_the_copies(checkpoint: Path, eager_artifact: Path) -> None:
    core = open_core(checkpoint, eager_artifact, 16, tiers=TierConfig(4 * MIB))
    run(core, conversations(2, 4, 2))
    assert core.stats().tiers["host"].used_bytes > 0
    assert core.reset_prefix_cache()
    assert core.stats().tiers["host"].used_bytes == 0
    assert run(core, [[[7] * 30]], 1)[1] == 0
    core.close()


def test_copies_outlive_the_contents_of_the_device(checkpoint: Path, eager_artifact: Path) -> None:
    """As when the engine sleeps."""
    core = open_core(checkpoint, eager_artifact, 16, tiers=TierConfig(4 * MIB))
    expected, _ = run(core, conversations(2, 4, 2))
    before = core.stats().tiers["host"]
    assert core.scheduler.cache.reset()
    for part in core.parts:
        part.reset("device")
    assert run(core, conversations(2, 4, 2))[0] == expected
    after = core.stats().tiers["host"]
    assert after.hit_tokens > before.hit_tokens
    assert after.used_bytes >= before.used_bytes > 0
    core.close()


def test_what_is_used_last_is_kept_where_host_memory_is_small(checkpoint: Path, eager_artifact: Path) -> None:
    """As when the engine falls asleep: host memory has room for one of two prompts, and older copies in it."""
    block = Artifact.open(eager_artifact).memory.block
    core = open_core(checkpoint, eager_artifact, 16, tiers=TierConfig(10 * block))
    short = SamplingParams(temperature=0.0, max_tokens=1)
    prompts = [[number, *range(10, 60)] for number in range(4)]
    for number, prompt in enumerate(prompts):
        finish(core, [request(f"{number}", prompt, short)])
    core.part(Tiers).leave()
    assert core.scheduler.cache.reset()
    for part in core.parts:
        part.reset("device")
    found = finish(core, [request("last", prompts[-1], short)])
    assert found["last"].cached == 48
    assert core.stats().tiers["host"].used_bytes <= 10 * block
    core.close()


@pytest.mark.parametrize(("size", "named"), [(100, "at least; give more"), (1 << 50, "of memory left; give less")])
def test_sizes_that_cannot_be(checkpoint: Path, eager_artifact: Path, size: int, named: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_offloading_size is .*{named}"):
        open_core(checkpoint, eager_artifact, 16, tiers=TierConfig(size))
