"""Prebuilt kernels of this machine: each C++ source of an op is a small shared library, named by its content. A package
brings those of several instruction sets, a clone makes those of its machine; a running engine needs no compiler."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from graphllm.config import Env
from graphllm.host.kernel_sources import LEVELS
from graphllm.host.machine import detect_target

PACKAGED = Path(__file__).parents[1] / "prebuilt"  # setup.py fills it
NATIVE_FOLDER = "native"


def find_library(name: str) -> Path | None:
    """Where the library of that name is for this machine; None where there is none."""
    return next((found for folder in folders() if (found := folder / name).is_file()), None)


def folders() -> tuple[Path, ...]:
    """Where libraries for this machine may be: made on it, then those that came with the package, the best first."""
    return (made_here(), *_packaged())


@functools.cache
def _packaged() -> tuple[Path, ...]:
    flags = set(detect_target("cpu").arch)
    return (PACKAGED / NATIVE_FOLDER, *(PACKAGED / level.name for level in LEVELS if level.needs <= flags))


def made_here() -> Path:
    """The folder of libraries that this machine makes for itself."""
    return Env.read().cache_dir / "kernels" / _machine()


@functools.cache
def _machine() -> str:
    return hashlib.sha256(" ".join(detect_target("cpu").arch).encode()).hexdigest()[:8]
