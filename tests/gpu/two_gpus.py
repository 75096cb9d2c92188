"""What the tests on two GPUs compile, in processes of their own beside each other. The GPUs are free of them when the
tests run: a kernel that waits for another rank gets few turns on a GPU that many processes use."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

FAMILIES = (("llama_biases", False), ("gemma2", False), ("qwen2_moe", False), ("gpt_oss", True))
# Of engines, with the smallest blocks that attention kernels of GPUs take.
OPTIONS: dict[str, Any] = {
    "target": "cuda", "dtype": "float32", "max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 32,
    "block_size": 16, "tune": False,
}  # fmt: skip


def end_with_parent() -> None:
    """For processes that tests start: a test run that is killed leaves none behind, waiting on a GPU."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Compiled:
    """cache: where engines of one and of two ranks find their artifacts, once ``wait`` has ended."""

    def __init__(self, checkpoint: Path, place: Path) -> None:
        self.cache, self._place = place / "cache", place
        here = Path(__file__).parent
        commands = {family: [str(here / "compile_family.py"), *self._words(family)] for family in FAMILIES}
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

    def family(self, name: str, apart: bool) -> Path:
        """The checkpoint of a family, which its artifact lies in."""
        return Path(self._words((name, apart))[-1])

    def _words(self, family: tuple[str, bool]) -> list[str]:
        name, apart = family
        return [name, "apart" if apart else "", str(self._place / f"{name}{apart}")]

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


def _flag(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    return [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
