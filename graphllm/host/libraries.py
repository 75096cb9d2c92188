"""C routines of shared libraries, found by name. Opening one imports nothing, and needs no compiler."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class Libraries:
    """Some shared libraries as one, opened when a routine is first asked for.

    files: the first that has a routine gives it. Raises OSError, when asked, for a library of another machine.
    """

    def __init__(self, files: Iterable[Path] = ()) -> None:
        self.files = tuple(files)

    def find(self, name: str) -> Any:
        """The routine of that name, as ctypes has it; None where there is none."""
        return next((found for library in self._opened if (found := getattr(library, name, None)) is not None), None)

    def number(self, name: str) -> ctypes.c_int64:
        """A global number of that name; 0 where there is none."""
        for library in self._opened:
            try:
                return ctypes.c_int64.in_dll(library, name)
            except ValueError:
                continue
        return ctypes.c_int64()

    @functools.cached_property
    def _opened(self) -> list[ctypes.CDLL]:
        openmp()
        return [ctypes.CDLL(str(file)) for file in self.files]


@functools.cache
def openmp() -> ctypes.CDLL:
    """The copy of OpenMP that kernels use: torch's own, so that there is one team of threads if torch is imported
    later; the system's where torch uses that."""
    return ctypes.CDLL(str(torch_openmp() or "libgomp.so.1"), mode=ctypes.RTLD_GLOBAL)


def torch_libraries() -> Path:
    """The folder of torch's libraries."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "lib"


def torch_openmp() -> Path | None:
    """torch's own copy of OpenMP; None where it uses the system's."""
    return next(iter(sorted(torch_libraries().glob("libgomp*.so*"))), None)
