"""Sums and gathers over the GPUs of one host inside captured graphs, one process a GPU: correct from 1 row to 8,192
rows, by every method, in many replays, and bitwise the same on all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.several_gpus import end_with_parent

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_collectives_in_a_graph(tmp_path: Path, ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} NVIDIA GPUs")
    worker = Path(__file__).with_name("all_reduce_worker.py")
    command = [sys.executable, str(worker)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=end_with_parent,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = [p.communicate(timeout=100)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.wait()
    assert [p.returncode for p in processes] == [0] * ranks, "\n".join(said)
    assert "SymmetricGroup" in said[0], said[0]
    assert all(f": {method}" in said[0] for method in ("one-shot", "two-shot", "library")), said[0]
