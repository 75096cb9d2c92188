"""Prebuilt kernels: each C++ source of an op as a small shared library, named by its content. A package brings those of
several instruction sets, a clone makes those of its machine; a running engine needs no compiler for them.

Imports nothing heavy, and nothing of graphllm but its neighbours, so that building a package can use it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from graphllm.config import Env
from graphllm.host.compiler import OPS, content
from graphllm.host.machine import detect_target

PACKAGED = Path(__file__).parents[1] / "prebuilt"
LOOPS = OPS / "cpu" / "loops" / "program.cpp"  # what runs between ops, and calls kernels


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


def library_name(source: Path) -> str:
    """The file name of a source's library, the same for every instruction set."""
    path = "-".join((*source.parent.parts[-1:], source.stem)).replace("_", "-")
    return f"{path}-{hashlib.sha256(content(source)).hexdigest()[:16]}.so"


def find_library(name: str) -> Path | None:
    """Where the library of that name is for this machine; None where there is none."""
    return next((found for folder in folders() if (found := folder / name).is_file()), None)


@functools.cache
def folders() -> tuple[Path, ...]:
    """Where libraries for this machine may be: made on it, then those that came with the package, the best first."""
    flags = set(detect_target("cpu").arch)
    return (made_here(), PACKAGED / "native", *(PACKAGED / level.name for level in LEVELS if level.needs <= flags))


def made_here() -> Path:
    """The folder of libraries that this machine makes for itself."""
    arch = hashlib.sha256(" ".join(detect_target("cpu").arch).encode()).hexdigest()[:8]
    return Env.read().cache_dir / "kernels" / arch


def link_command(objects: Sequence[Path], output: Path) -> list[str]:
    """The g++ command that links a library. It names no copy of OpenMP: the one that torch brings is loaded before."""
    return ["g++", "-shared", *map(str, objects), "-o", str(output)]


def sources() -> list[Path]:
    """All sources of ops' kernels, the longest first."""
    found = (s for s in OPS.glob("*/*/*.cpp") if s.parent.parent != OPS / "cpu")
    return sorted(found, key=lambda s: (-s.stat().st_size, s))
