"""What the tests on several GPUs compile, in processes of their own beside each other. The GPUs are free of them when
the tests run: a kernel that waits for another rank gets few turns on a GPU that many processes use."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Family(NamedTuple):
    """A family of `tests/models` on so many GPUs. apart: its experts by number."""

    name: str
    ranks: int
    apart: bool = False

    def __str__(self) -> str:
        return f"{self.name}-{self.ranks}{'-apart' if self.apart else ''}"


_FAMILIES = (
    Family("llama_biases", 2), Family("gemma2", 2), Family("qwen2_moe", 2), Family("gpt_oss", 2, apart=True),
    Family("llama_biases", 4), Family("gemma2", 4), Family("olmoe", 4), Family("mixtral", 4, apart=True),
)  # fmt: skip
FAMILIES = [family for family in _FAMILIES if family.ranks <= torch.cuda.device_count()]
# Of engines, with the smallest blocks that attention kernels of GPUs take.
OPTIONS: dict[str, Any] = {
    "target": "cuda", "dtype": "float32", "max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 32,
    "block_size": 16, "tune": False,
}  # fmt: skip


def end_with_parent() -> None:
    """For processes that tests start: a test run that is killed leaves none behind, waiting on a GPU."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def check_dying(checkpoint: Path, settings: dict[str, Any]) -> None:
    """An engine of two ranks is told at once which one dies, and another one takes its place. In a process of its own,
    since the other rank's GPU may wait for ever where this fails."""
    words = [sys.executable, str(Path(__file__).with_name("dying_rank.py")), str(checkpoint), json.dumps(settings)]
    done = subprocess.run(words, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[:6000]
    told = re.search(
        r"process (\d+): told after ([\d.]+) s: rank 1 of 2 \(process (\d+)\) was killed by signal 9", done.stdout
    )
    assert told is not None, done.stdout
    assert told[1] == told[3]
    assert float(told[2]) < 5
    assert re.search(r"another engine says \[\d+, \d+, \d+, \d+\]", done.stdout), done.stdout


class Compiled:
    """cache: where engines of one and of two ranks find their artifacts, once ``wait`` has ended."""

    def __init__(self, checkpoint: Path, place: Path) -> None:
        self.cache, self._place = place / "cache", place
        here = Path(__file__).parent
        commands: dict[Any, list[str]] = {
            family: [str(here / "compile_family.py"), *self._words(family)] for family in FAMILIES
        }
        flags = [w for name, v in OPTIONS.items() for w in _flag(name, v)]
        for ranks in (1, 2):
            words = ["-m", "graphllm.cli", "compile", str(checkpoint), *flags, "--tensor-parallel-size", str(ranks)]
            commands["engine", ranks] = words
            commands["engine", ranks] += ["--jobs", "4"]  # each a process with a context on the GPU
        environment = {**os.environ, "GRAPHLLM_CACHE": str(self.cache), "OMP_NUM_THREADS": "2"}
        self._processes = {
            name: subprocess.Popen(
                [sys.executable, *words],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                preexec_fn=end_with_parent,
            )
            for name, words in commands.items()
        }

    def wait(self) -> None:
        """Until all is compiled."""
        for process in self._processes.values():
            said = process.communicate(timeout=200)[0]
            assert process.returncode == 0, said

    def family(self, family: Family) -> Path:
        """The checkpoint of a family, which its artifact lies in."""
        return self._place / str(family)

    def _words(self, family: Family) -> list[str]:
        return [family.name, str(family.ranks), "apart" if family.apart else "", str(self.family(family))]

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


def _flag(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    return [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
