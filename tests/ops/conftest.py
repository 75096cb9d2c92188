"""Fixtures for tests of C++ kernels: compiled for another instruction level, and run by some threads."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from graphllm.host.compiler import compiler_command
from graphllm.ir.kernels import CKernel, bind_symbol


@pytest.fixture(scope="module")
def compiled_for(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Sequence[CKernel], Sequence[str]], AbstractContextManager[Path]]:
    """Binds kernels to a library that is compiled with further flags, and says where it is."""

    @contextlib.contextmanager
    def bound(kernels: Sequence[CKernel], flags: Sequence[str]) -> Iterator[Path]:
        folder = tmp_path_factory.mktemp("kernels")
        objects = {folder / f"{source.parent.name}-{source.stem}.o": source for source in {k.source for k in kernels}}
        for made, source in objects.items():
            command = compiler_command([source], made, link=False)
            subprocess.run([*command, *flags], check=True)  # the last -march counts
        output = folder / "kernels.so"
        subprocess.run(compiler_command(sorted(objects), output), check=True)
        library = ctypes.CDLL(str(output))
        before = [k._function for k in kernels]
        for k in kernels:
            k._function = bind_symbol(library, k.symbol, k.argument_types)
        yield output
        for k, function in zip(kernels, before, strict=True):
            k._function = function

    return bound


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
