"""The instruction sets that C++ kernels are tested with on this machine: what it has, and those below that."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from graphllm.host.machine import detect_target
from graphllm.ir.kernels import CKernel
from tests.tiers import thorough

X86 = platform.machine() == "x86_64"
AMX = "amx_bf16" in detect_target("cpu").arch
_HERE = {  # whether the level differs from what this machine has
    "native": True,
    "no-amx": AMX,
    "avx2": X86 and "avx512_bf16" in detect_target("cpu").arch,
    "generic": True,
}
_FLAGS = {
    "native": [],
    "no-amx": ["-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8"],
    "avx2": ["-march=x86-64-v3"],
    "generic": [*(["-march=x86-64"] if X86 else []), "-DGRAPHLLM_GENERIC"],
}
LEVELS = {name: flags for name, flags in _FLAGS.items() if _HERE[name]}  # flags of the compiler by name
PARAMS: list[Any] = [name if name == "native" else thorough(name) for name in LEVELS]


def level_of(kernels: Sequence[CKernel], params: Sequence[Any] = PARAMS) -> Any:
    """A module's fixture ``level``: binds these kernels to a library compiled for each level in turn, but for the
    machine's own, which the shared suite binds."""

    @pytest.fixture(scope="module", params=params)
    def level(
        request: pytest.FixtureRequest,
        compiled_for: Callable[[Sequence[CKernel], Sequence[str]], AbstractContextManager[Path]],
    ) -> Iterator[str]:
        if request.param == "native":
            yield request.param
            return
        with compiled_for(kernels, LEVELS[request.param]):
            yield request.param

    return level
