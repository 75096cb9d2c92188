"""The cache's host memory on a GPU: what was copied comes back as it was, while steps run, and texts are those of a
cache in which nothing leaves the device."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
from graphllm.config import TierConfig  # noqa: E402
from graphllm.engine.core import EngineCore  # noqa: E402
from graphllm.engine.parts.tiers import Tiers  # noqa: E402
from graphllm.loading.checkpoint.source import open_source  # noqa: E402
from graphllm.runtime.commands.states import ReadBlocks, WriteBlocks  # noqa: E402
from graphllm.runtime.commands.tiers import EndedCopies, LoadEntries, StoreEntries  # noqa: E402
from tests.artifacts import LIMITS, ON, artifact_of  # noqa: E402
from tests.engine.harness import open_core  # noqa: E402
from tests.engine.tiers.test_tiers_engine import compare  # noqa: E402
from tests.models import test_parity as parity  # noqa: E402

HOST = 64 << 20
CUDA = {**LIMITS, **ON["cuda"]}


def ready(core: EngineCore) -> None:
    """Wait until all of host memory is registered."""
    while not core.part(Tiers).preparing.all():
        time.sleep(0.01)


def wait(core: EngineCore, count: int) -> None:
    while count:
        count -= len(core.executor.ask(EndedCopies())[0].value)


def test_blocks_come_back_as_they_were(checkpoint: Path) -> None:
    core = open_core(checkpoint, artifact_of(checkpoint, **CUDA), 200, tiers=TierConfig(HOST))
    ready(core)
    executor, draw, blocks = core.executor, torch.Generator().manual_seed(0), list(range(1, 180))
    size = sum(executor.block_bytes)
    contents = [torch.randint(256, (size,), generator=draw, dtype=torch.uint8).numpy().tobytes() for _ in blocks]
    executor.do(WriteBlocks(blocks, contents, executor.block_bytes))
    executor.do(StoreEntries({"blocks": [(block, 400 - block) for block in blocks]}, 1 << 40, False, True))
    wait(core, 1)
    executor.do(WriteBlocks(blocks, [bytes(size)] * len(blocks), executor.block_bytes))
    executor.do(LoadEntries({"blocks": [(400 - block, block) for block in blocks]}, 1 << 41, 0))
    wait(core, 1)
    assert executor.ask(ReadBlocks(blocks))[0].value == contents
    core.close()


def test_a_blocking_copy_comes_before_what_overwrites_it(checkpoint: Path) -> None:
    core = open_core(checkpoint, artifact_of(checkpoint, **CUDA), 200, tiers=TierConfig(HOST))
    ready(core)
    executor, size = core.executor, sum(core.executor.block_bytes)
    states = executor.states  # type: ignore[attr-defined]

    def overwrite() -> None:
        for tensor in states.entries("blocks"):
            tensor.zero_()

    for round in range(20):
        blocks = list(range(1, 180))
        executor.do(WriteBlocks(blocks, [bytes([round + 1]) * size] * len(blocks), executor.block_bytes))
        executor.do(StoreEntries({"blocks": [(block, block) for block in blocks]}, round, True, False))
        executor.in_order(overwrite)  # type: ignore[attr-defined]
        executor.do(LoadEntries({"blocks": [(block, block) for block in blocks]}, 1 << 40, round))
        wait(core, 1)
        assert executor.ask(ReadBlocks(blocks[:40]))[0].value == [bytes([round + 1]) * size] * 40
    core.close()


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_texts(checkpoint: Path, policy: str) -> None:
    compare(checkpoint, artifact_of(checkpoint, **CUDA), 10, policy)


@pytest.mark.parametrize(
    ("name", "pages", "snapshots"), [("qwen3_next", 20, (40, 6)), ("mamba2", 16, (40, 6)), ("gemma3", 24, None)]
)
def test_texts_of_families(name: str, pages: int, snapshots: tuple[int, int] | None, tmp_path: Path) -> None:
    parity.saved_oracle(next(a for a in parity.ARCHS if a.name == name), tmp_path)
    compare(tmp_path, artifact_of(open_source(tmp_path), **CUDA), pages, snapshots=snapshots)
