"""Kernels of several ranks that give each other numbers: processes with Triton's interpreter, of which any may be late;
and the process that builds them, which has no other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from graphllm.ir.exchange import _alone
from graphllm.ops.all_reduce import all_reduce


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_that_take_turns_in_being_late(ranks: int, tmp_path: Path) -> None:
    worker = Path(__file__).with_name("exchange_worker.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(ranks), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = [p.communicate(timeout=100)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.wait()
    assert all(text.endswith("same\n") for text in said), "\n".join(said)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_alone_every_peer_gives_the_same(ranks: int, dtype: torch.dtype) -> None:
    """Where kernels are built and timed."""
    for shape in ((3, 7), (2, 2048)):  # what fits no group of numbers, and several programs
        x = torch.randn(shape).to(dtype)
        for _ in range(3):
            found = all_reduce.impls["exchange"].fn(x=x, ranks=ranks)
            torch.testing.assert_close(found, (x.float() * ranks).to(dtype), atol=0.01, rtol=0.002)
    assert (_alone(ranks, x.device)[1] == 255).all()
