"""How C++ kernels are compiled: g++'s command for this machine. Imports nothing heavy: compilers start before torch is
imported."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from graphllm.config import ConfigError
from graphllm.host.kernel_sources import compile_command
from graphllm.host.libraries import torch_libraries, torch_openmp


def compiler_command(sources: Sequence[Path], output: Path, link: bool = True) -> list[str]:
    """The g++ command that makes one shared library (or, without ``link``, one object) of C++ kernels for this machine.

    OpenMP is torch's own copy, by its file name, so that the process has one thread pool and needs no libgomp package.
    """
    command = compile_command(sources, output)
    if not link:
        return [*command, "-c"]
    torch_lib, gomp = torch_libraries(), torch_openmp()
    openmp = [f"-L{torch_lib}", f"-l:{gomp.name}"] if gomp else ["-lgomp"]
    # Generated kernels may call into torch's libraries. Those that do not run without them (`HostArray`).
    return [*command, "-shared", *openmp, f"-L{torch_lib}", "-Wl,--as-needed", "-ltorch_cpu", "-lc10"]


def check_compiler() -> None:
    """Raise ConfigError unless g++ makes a shared library. Called before minutes of work that would need it."""
    command = ["g++", "-std=c++17", "-march=native", "-fPIC", "-shared", "-x", "c++", "-", "-o", os.devnull]
    broken = ""
    try:
        done = subprocess.run(command, input="#include <vector>\n", capture_output=True, text=True)
        if done.returncode:
            broken = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    except OSError as reason:
        broken = reason.strerror or str(reason)
    if broken:
        raise ConfigError(
            f"g++ is not installed or does not work ({broken}), and compiling for a CPU needs it: install it "
            "(apt-get install g++), or run an artifact that was compiled elsewhere with --artifact FOLDER"
        )
