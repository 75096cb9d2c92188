"""Weights that lie in memory of the host: texts, logits and updates are those of an engine that has all on its device.
On a CPU a copy is one of memory, in order; everything else is as on a GPU."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graphllm import LLM
from graphllm.config import (
    CacheConfig,
    ConfigError,
    CoreConfig,
    EngineArgs,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
)
from graphllm.loading.checkpoint.source import open_source
from graphllm.loading.core.load import load_core
from graphllm.loading.core.place import rank_place
from graphllm.loading.core.rank_device import begin_weights
from graphllm.loading.core.stored_weights import StoredWeights
from graphllm.program.artifact import Artifact
from graphllm.program.offloading import BUFFERS, OFFLOADED
from graphllm.runtime.executor import Executor
from graphllm.runtime.memory.staging import ragged
from tests.artifacts import LIMITS, artifact_of
from tests.conftest import make_llama
from tests.engine.harness import finish, request
from tests.models import test_parity as parity
from tests.tiers import thorough

LAYERS = 6
SMALL = 300_000 / 2**30  # GiB: of this model about half
ALL = 1.0


@pytest.fixture(scope="module")
def folder(shared: Callable[..., Path]) -> Path:
    return shared("llama-6", lambda place: make_llama(place, layers=LAYERS))


def weights_of(folder: Path, artifact: Path, gib: float, load_format: Any = "auto") -> dict[str, Any]:
    """As a rank loads them, those of a GPU in memory of this machine."""
    config = CoreConfig(
        ModelConfig(str(folder)), LoadConfig(str(artifact), load_format=load_format, cpu_offload_gb=gib)
    )
    opened = Artifact.open(artifact)
    with begin_weights(StoredWeights(config, opened), torch.device("cpu"), rank_place(config, 1, 0)) as loading:
        return loading.finish()


def run(executor: Executor, steps: int = 8) -> list[np.ndarray]:
    """Logits of two prompts in one step, then of both sequences decoding, then of one."""
    block = executor.layout.groups[0].block_size if executor.layout.groups else 16
    tables = [np.arange(1, 1 + 2 * (64 // block), dtype=np.int32).reshape(2, -1)] * max(1, len(executor.layout.groups))
    rows, starts = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22]], [0, 0]
    found = []
    for number in range(steps):
        if number == steps - 2:
            rows, starts, tables = rows[:1], starts[:1], [table[:1] for table in tables]
        result = executor.run(ragged(rows, starts, tables))
        found.append(result.logits.clone().numpy())
        starts = [start + len(row) for start, row in zip(starts, rows, strict=True)]
        rows = [[int(token)] for token in result.tokens]
    return found


def assert_same(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert len({tuple(logits.argmax(-1)) for logits in one}) > 1  # the work is real


@pytest.mark.parametrize("backend", ["eager", thorough("prebuilt"), thorough("inductor")])
@pytest.mark.parametrize("gib", [SMALL, ALL])
def test_steps_are_the_same(folder: Path, backend: str, gib: float) -> None:
    artifact = artifact_of(folder, backend=backend, **LIMITS)
    opened = Artifact.open(artifact)
    plain = Executor(opened, weights_of(folder, artifact, 0), 40)
    weights = weights_of(folder, artifact, gib)
    offloaded = weights[OFFLOADED]
    assert BUFFERS < len(offloaded.groups) < LAYERS if gib == SMALL else len(offloaded.groups) >= LAYERS
    memories = {weights[name].untyped_storage().data_ptr() for names in offloaded.groups for name in names}
    assert len(memories) == BUFFERS
    executor = Executor(opened, weights, 40)
    assert_same(run(plain), run(executor))
    found = executor.worker.weights
    assert found.keys() == plain.worker.weights.keys()
    assert all(torch.equal(found[name], own) for name, own in plain.worker.weights.items())
    executor.close()
    plain.close()


@pytest.mark.parametrize("name", ["gemma3", thorough("qwen3_next"), thorough("deepseek_v3")])
def test_families(name: str, tmp_path: Path) -> None:
    """Windows, recurrent states, latents and experts."""
    parity.saved_oracle(next(a for a in parity.ARCHS if a.name == name), tmp_path)
    artifact = artifact_of(open_source(tmp_path), backend="eager", **LIMITS)
    opened = Artifact.open(artifact)
    executors = [Executor(opened, weights_of(tmp_path, artifact, gib), 40, 2) for gib in (0, ALL)]
    assert_same(*map(run, executors))
    for executor in executors:
        executor.close()


def test_what_is_written_is_used(folder: Path) -> None:
    """`collective_rpc` writes weights where they stay: the next step has them, and so has every later one."""
    artifact = artifact_of(folder, backend="eager", **LIMITS)
    opened = Artifact.open(artifact)

    def executor(gib: float) -> Executor:
        made = Executor(opened, weights_of(folder, artifact, gib), 40)
        run(made, 3)
        for name, weight in made.worker.weights.items():
            if re.match(r"layers\.\d+\.", name):
                weight.mul_(1.25)
        return made

    assert_same(run(executor(0)), run(executor(ALL)))


def test_memory_is_given_back(folder: Path) -> None:
    artifact = artifact_of(folder, backend="eager", **LIMITS)
    weights = weights_of(folder, artifact, ALL)
    offloaded = weakref.ref(weights[OFFLOADED])
    executor = Executor(Artifact.open(artifact), weights, 40)
    run(executor, 3)
    executor.close()
    del weights
    gc.collect()
    assert offloaded() is None


def test_random_weights_are_the_same(folder: Path) -> None:
    artifact = artifact_of(folder, backend="eager", **LIMITS)
    opened = Artifact.open(artifact)
    plain, offloaded = (Executor(opened, weights_of(folder, artifact, gib, "dummy"), 40) for gib in (0, ALL))
    assert_same(run(plain), run(offloaded))


def tokens(folder: Path, artifact: Path, gib: float, stages: int = 1, draft: Path | None = None) -> list[list[int]]:
    """What an engine core answers to three prompts."""
    config = CoreConfig(
        ModelConfig(str(folder), speculative_model=None if draft is None else str(draft)),
        LoadConfig(str(artifact), cpu_offload_gb=gib),
        CacheConfig(kv_cache_memory_bytes=1 << 20),
        parallel=ParallelConfig(pipeline_parallel_size=stages),
    )
    core = load_core(config)
    try:
        prompts = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22], [30]]
        found = finish(core, [request(str(n), prompt) for n, prompt in enumerate(prompts)])
        return [found[str(n)].tokens for n in range(len(prompts))]
    finally:
        core.close()


@pytest.mark.thorough
@pytest.mark.parametrize("degree", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_every_rank_has_its_own(folder: Path, degree: str) -> None:
    """Each rank has its share of the weights on the host; in a pipeline copies stand between messages."""
    settings = {degree: 2} if degree.startswith("tensor") else {}
    artifact = artifact_of(folder, backend="eager", **LIMITS, **settings)
    stages = 1 if settings else 2
    assert tokens(folder, artifact, ALL, stages) == tokens(folder, artifact, 0, stages)


@pytest.mark.thorough
def test_drafts(folder: Path, checkpoint: Path) -> None:
    """The weights of a draft model stay on the device; steps that verify drafts copy as others do."""
    source = open_source(folder, draft=checkpoint, method="draft_model")
    artifact = artifact_of(source, backend="eager", num_speculative_tokens=2, **LIMITS)
    assert tokens(folder, artifact, ALL, draft=checkpoint) == tokens(folder, artifact, 0, draft=checkpoint)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cpu_offload_gb": -1}, "cpu_offload_gb is -1: it must be at least 0"),
        ({"cpu_offload_gb": 4, "enable_sleep_mode": True}, "cpu_offload_gb is 4 and enable_sleep_mode is True: "),
        ({"cpu_offload_gb": 4, "enable_eplb": True}, "cpu_offload_gb is 4 and enable_eplb is True: "),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(given: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(**given)


def test_a_cpu_refuses(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"cpu_offload_gb is 0\.5: on a CPU all weights lie in the host's memory; leave"
    ):
        LLM(folder, target="cpu", cpu_offload_gb=0.5, **LIMITS)


def test_too_few_layers(checkpoint: Path, eager_artifact: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"cpu_offload_gb is 1: the device saves nothing, .* room for 2 of this model's"
    ):
        weights_of(checkpoint, eager_artifact, 1)
