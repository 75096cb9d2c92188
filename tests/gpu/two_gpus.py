"""What the tests on two GPUs compile, in processes of their own that all start before the first of these tests."""

from __future__ import annotations

import os
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


class Compiled:
    """cache: where engines of one and of two ranks find their artifacts, once ``wait`` was called for them."""

    def __init__(self, checkpoint: Path, place: Path) -> None:
        self.cache, self._place = place / "cache", place
        here = Path(__file__).parent
        commands = {family: [str(here / "compile_family.py"), *self._words(family)] for family in FAMILIES}
        flags = [w for name, v in OPTIONS.items() for w in _flag(name, v)]
        for ranks in (1, 2):
            words = ["-m", "graphllm.cli", "compile", str(checkpoint), *flags, "--tensor-parallel-size", str(ranks)]
            commands["engine", ranks] = words
        environment = {**os.environ, "GRAPHLLM_CACHE": str(self.cache), "OMP_NUM_THREADS": "2"}
        self._processes = {
            name: subprocess.Popen(
                [sys.executable, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            for name, words in commands.items()
        }

    def wait(self, kind: str, which: Any) -> None:
        """Until something is compiled: ("engine", ranks), or a family."""
        process = self._processes[kind, which]
        said = process.communicate()[0] if process.returncode is None else ""
        assert process.returncode == 0, said

    def family(self, name: str, apart: bool) -> Path:
        """The checkpoint of a family, which its artifact lies in."""
        self.wait(name, apart)
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
