"""The C++ sources of kernels, how they are compiled, and the libraries that are made of them.

Imports the standard library only: building a package uses it, where nothing else is installed.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

OPS = Path(__file__).resolve().parents[1] / "ops"  # kernels lie in FAMILY/OP, what several of them include in cpu
LOOPS = OPS / "cpu" / "loops" / "program.cpp"  # what runs between ops, and calls kernels
NATIVE = ("-march=native",)


class Level(NamedTuple):
    """An instruction set that a package has kernels for. needs: flags of a processor. options: of g++."""

    name: str
    needs: frozenset[str]
    options: tuple[str, ...]


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni"}
_AMX = _AVX512 | {"amx_tile", "amx_bf16", "amx_int8"}
_WIDE = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mprefer-vector-width=512")
LEVELS = (  # the best first
    Level("amx", _AMX, (*_WIDE, "-mamx-tile", "-mamx-bf16", "-mamx-int8")),
    Level("avx512", _AVX512, _WIDE),
    Level("avx2", _AVX2, ("-march=x86-64-v3",)),
)


def compile_command(sources: Sequence[Path], output: Path, machine: Sequence[str] = NATIVE) -> list[str]:
    """The g++ command that compiles C++ kernels; what follows says whether to an object or a library.

    Arithmetic is relaxed as by -ffast-math, except for finite math; that flag would, before gcc 13, link in code that
    makes the loading thread, and all it starts, flush denormals. Functions begin on cache lines: where one of 16 bytes
    began otherwise, as what stands before it grew, the same kernel took up to 5 % longer.
    """
    relaxed = ["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math"]
    flags = ["-std=c++17", "-O3", *machine, "-falign-functions=64", *relaxed, "-fPIC", f"-I{OPS}"]
    return ["g++", *flags, "-fopenmp", "-Wno-psabi", *map(str, sources), "-o", str(output)]


def link_command(objects: Sequence[Path], output: Path) -> list[str]:
    """The g++ command that links a prebuilt library. It names no copy of OpenMP: torch's is loaded before."""
    return ["g++", "-shared", *map(str, objects), "-o", str(output)]


def content(source: Path) -> bytes:
    """A source of kernels with all that it may include apart from the standard library: headers of ops/cpu and of its
    own folder."""
    headers = (*sorted((OPS / "cpu").rglob("*.h")), *sorted(source.parent.glob("*.h")))
    return b"".join(file.read_bytes() for file in (source, *headers))


def library_name(source: Path) -> str:
    """The file name of a source's library, the same for every instruction set."""
    name = f"{source.parent.name}-{source.stem}".replace("_", "-")
    return f"{name}-{hashlib.sha256(content(source)).hexdigest()[:16]}.so"


def sources() -> list[Path]:
    """All sources of ops' kernels, the longest first."""
    found = (s for s in OPS.glob("*/*/*.cpp") if s.parent.parent.name != "cpu")
    return sorted(found, key=lambda s: (-s.stat().st_size, s))


def build_libraries(folder: Path, machine: Sequence[str] = NATIVE) -> list[str]:
    """Make the libraries of all kernels in a folder, those that are not there, and remove those of older sources; what
    could not be made. machine: g++'s options for an instruction set."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {library_name(source): source for source in (*sources(), LOOPS)}
    for old in folder.glob("*.so"):
        if old.name not in wanted:
            old.unlink()

    def make(name: str, source: Path) -> str | None:
        partial = folder / f".{os.getpid()}-{name}"
        made, linked = partial.with_suffix(".o"), partial
        try:
            for command in ([*compile_command([source], made, machine), "-c"], link_command([made], linked)):
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    return f"{source.name}: {done.stderr.strip()[-500:]}"
            linked.replace(folder / name)
        finally:
            made.unlink(missing_ok=True)
            linked.unlink(missing_ok=True)
        return None

    missing = {name: source for name, source in wanted.items() if not (folder / name).exists()}
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return [problem for problem in pool.map(make, missing, missing.values()) if problem is not None]
