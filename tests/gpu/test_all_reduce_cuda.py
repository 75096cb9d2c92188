"""Sums and gathers over two GPUs inside captured graphs, one process a GPU: correct from 1 row to 8,192 rows, by every
method, in many replays, and bitwise the same on both."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from two_gpus import end_with_parent

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")]
RANKS = 2


def test_collectives_in_a_graph(tmp_path: Path) -> None:
    worker = Path(__file__).with_name("all_reduce_worker.py")
    command = [sys.executable, str(worker)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(RANKS), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=end_with_parent,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        said = [p.communicate(timeout=100)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.wait()
    assert [p.returncode for p in processes] == [0] * RANKS, "\n".join(said)
    assert "SymmetricGroup" in said[0], said[0]
    assert all(f": {method}" in said[0] for method in ("one-shot", "two-shot", "library")), said[0]
