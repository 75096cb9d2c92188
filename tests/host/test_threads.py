"""How many threads the kernels of a CPU get, and that no other thread of the process has some of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from graphllm.config import ConfigError
from graphllm.host import machine
from graphllm.loading.artifact import resolve
from graphllm.loading.artifact.resolve import kernel_threads

CPUS = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({}, CPUS),
        ({"cpu.max": "max 100000\n"}, CPUS),
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "9900000 100000\n"}, CPUS),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, CPUS),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
    ],
)
def test_control_groups_limit_cpus(
    files: dict[str, str], most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert machine.usable_cores() == most


def test_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(resolve, "usable_cores", lambda: 4)
    assert kernel_threads(None, "cpu") == 4
    assert kernel_threads(3, "cpu") == 3
    assert kernel_threads(None, "cuda") is None
    for wrong, device, says in (
        (0, "cpu", "threads is 0: give 1 to 4"),
        (5, "cpu", "threads is 5: give 1 to 4"),
        (2, "cuda", "threads is 2: .* leave it out"),
    ):
        with pytest.raises(ConfigError, match=says):
            kernel_threads(wrong, device)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert kernel_threads(None, "cpu") is None
    assert kernel_threads(2, "cpu") == 2


def test_option(cli: Any, checkpoint: Path, eager_artifact: Path) -> None:
    done = cli("run", "-m", checkpoint, "-p", "a", "--artifact", eager_artifact, "--threads", CPUS + 1)
    assert done.code == 2
    assert f"threads is {CPUS + 1}: give 1 to {CPUS}" in done.err


SCRIPT = """
import os, sys, threading
import numpy, torch
from graphllm.config import CacheConfig, CoreConfig, LoadConfig, ModelConfig
from graphllm.loading.core.load import load_core

def native():
    return len(os.listdir("/proc/self/task")) - threading.active_count()

def work():
    torch.ones(400, 400).exp()  # enough for all threads
    return torch.get_num_threads()

before = native()
load = LoadConfig(sys.argv[2], load_format="dummy", threads=int(sys.argv[3]) or None)
settings = CoreConfig(ModelConfig(sys.argv[1]), load, CacheConfig(kv_cache_memory_bytes=1 << 20))
core = load_core(settings)
held = core.executor.stream.submit(work).result()
print(native() - before, held, torch.get_num_threads())
core.close()
"""


@pytest.mark.thorough
def test_kernels_have_the_only_threads(checkpoint: Path, eager_artifact: Path, tmp_path: Path) -> None:
    """Loading must start no OpenMP threads but those of the stream: with more than CPUs, none of them spins."""
    shutil.copy(checkpoint / "config.json", tmp_path)  # without a tokenizer, whose grammars have threads of their own
    found = []
    for threads, count in (("3", "1"), ("3", "2"), ("0", "2")):  # 0: as many as OMP_NUM_THREADS says
        command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(eager_artifact), threads]
        environment = os.environ | {"OMP_NUM_THREADS": count}
        found.append(
            subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout.split()
        )
    assert found == [["2", "3", "1"], ["2", "3", "2"], ["1", "2", "2"]]
