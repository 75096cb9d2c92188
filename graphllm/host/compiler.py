"""How C++ kernels are compiled: g++'s command for this machine. Imports nothing heavy: compilers start before torch is
imported."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from graphllm.config import ConfigError

OPS = Path(__file__).parents[1] / "ops"  # kernels lie in FAMILY/OP, what several of them include in cpu


def compiler_command(sources: Sequence[Path], output: Path, link: bool = True) -> list[str]:
    """The g++ command that makes one shared library (or, without ``link``, one object) of C++ kernels for this machine.

    OpenMP is torch's own copy, by its file name, so that the process has one thread pool and needs no libgomp package.
    Arithmetic is relaxed as by -ffast-math, except for finite math; that flag would, before gcc 13, link in code that
    makes the loading thread, and all it starts, flush denormals. Functions begin on cache lines: where one of 16 bytes
    began otherwise, as what stands before it grew, the same kernel took up to 5 % longer.
    """
    relaxed = ["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math"]
    flags = ["-std=c++17", "-O3", "-march=native", "-falign-functions=64", *relaxed, "-fPIC", f"-I{OPS}"]
    command = ["g++", *flags, "-fopenmp", "-Wno-psabi", *map(str, sources), "-o", str(output)]
    if not link:
        return [*command, "-c"]
    torch_lib, gomp = _torch_libraries(), _openmp()
    openmp = [f"-L{torch_lib}", f"-l:{gomp.name}"] if gomp else ["-lgomp"]
    # Generated kernels may call into torch's libraries. Those that do not run without them (`HostArray`).
    return [*command, "-shared", *openmp, f"-L{torch_lib}", "-Wl,--as-needed", "-ltorch_cpu", "-lc10"]


def open_library(file: Path) -> ctypes.CDLL:
    """A library that `compiler_command` has made, with the copy of OpenMP that torch will use if it is imported later.
    Raises OSError for one of another machine."""
    ctypes.CDLL(str(_openmp() or "libgomp.so.1"), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(file))


def _torch_libraries() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "lib"


def _openmp() -> Path | None:
    """torch's own copy; None where it uses the system's."""
    return next(iter(sorted(_torch_libraries().glob("libgomp*.so*"))), None)


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


def content(source: Path) -> bytes:
    """A source of kernels with all that it may include apart from the standard library: headers of ops/cpu and of its
    own folder."""
    headers = (*sorted((OPS / "cpu").rglob("*.h")), *sorted(source.parent.glob("*.h")))
    return b"".join(file.read_bytes() for file in (source, *headers))
