"""Families divided among two and four GPUs, compiled, one process a GPU, beside transformers in float32. One command
runs what GPUs do together, in two minutes on two:

    python -m pytest -m gpu tests/gpu/test_all_reduce_cuda.py tests/gpu/test_ranks_cuda.py \\
        tests/gpu/test_tensor_parallel_cuda.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gpu.several_gpus import FAMILIES, Compiled, Family

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")]
from graphllm.runtime.memory.staging import StepInput  # noqa: E402
from tests.models import test_parity as parity  # noqa: E402
from tests.runtime.artifact_ranks import Ranks  # noqa: E402

N_TOKENS, LENGTHS = 8, (1, 7, 90)


class Processes:
    """`Ranks` as `Runner` runs an executor."""

    def __init__(self, folder: Path, ranks: int) -> None:
        groups = json.loads((folder / "artifact" / "program.json").read_text())["blocks"]["groups"]
        self.layout = SimpleNamespace(num_blocks=64, groups=groups)
        self._ranks = Ranks(folder / "artifact", folder, ranks, 64)
        self.close = self._ranks.close

    def run(self, step: StepInput) -> Any:
        found = self._ranks.run(step)
        return SimpleNamespace(tokens=found["tokens"], logits=torch.from_numpy(found["logits"].copy()))


Opened = dict[Family, Future[Processes]]


@pytest.fixture(scope="module")
def opened(compiled: Compiled) -> Iterator[Opened]:
    """The processes of all families, which start beside each other."""
    with ThreadPoolExecutor(len(FAMILIES)) as pool:
        found = {f: pool.submit(Processes, compiled.family(f), f.ranks) for f in FAMILIES}
        yield found
        for future in found.values():
            if future.exception() is None:
                future.result().close()


@pytest.mark.parametrize("family", FAMILIES, ids=str)
@torch.no_grad()
def test_gpus_give_what_transformers_does(family: Family, opened: Opened) -> None:
    runner = parity.driver.Runner(opened[family].result())
    arch = next(a for a in parity.ARCHS if a.name == family.name)
    model = parity._build(arch, arch.config | arch.oracle)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(parity.V, (n,), generator=draw).tolist() for n in LENGTHS]
    for _ in range(2):  # the second time every graph is replayed
        logits, tokens = runner.generate(prompts, N_TOKENS)
        for i, prompt in enumerate(prompts):
            expected = parity._forced(model, prompt, tokens[i])
            torch.testing.assert_close(logits[i], expected[0], atol=2e-3, rtol=0)
            best = expected.topk(2).values
            clear = best[:, 0] - best[:, 1] > 4e-3
            assert (torch.tensor(tokens[i]) == expected.argmax(-1))[clear].all()
