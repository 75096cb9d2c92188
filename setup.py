"""Builds kernels with the package; pyproject.toml has all else.

A wheel gets the kernels of every instruction set, an editable install those of the machine; GRAPHLLM_KERNELS says
otherwise (all, native, none). Without g++ there are none: an engine that needs them says so.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

PACKAGE = Path(__file__).parent / "graphllm"


def kernel_sources() -> ModuleType:
    """The module without the package around it, which imports what is not installed here."""
    spec = importlib.util.spec_from_file_location("kernel_sources", PACKAGE / "host" / "kernel_sources.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    """The package's modules, and its kernels."""

    def run(self) -> None:
        """Copy modules, then compile."""
        super().run()
        wanted = os.environ.get("GRAPHLLM_KERNELS") or ("native" if self.editable_mode else "all")
        if shutil.which("g++") is None or wanted == "none":
            print("graphllm: no prebuilt kernels: g++ is not installed, or GRAPHLLM_KERNELS is none")
            return
        kernels, place = kernel_sources(), PACKAGE if self.editable_mode else Path(self.build_lib) / "graphllm"
        native = kernels.Level("native", frozenset(), kernels.NATIVE)
        for level in [native] if wanted == "native" else kernels.LEVELS:
            self.made(kernels, place / "prebuilt" / level.name, level.options)

    def made(self, kernels: ModuleType, folder: Path, options: Any) -> None:
        """Compile for one instruction set. A wheel is whole or not built."""
        problems = kernels.build_libraries(folder, options)
        for problem in problems:
            print(f"graphllm: {folder.name}: {problem}")
        if problems and not self.editable_mode:
            raise SystemExit("graphllm: not all kernels could be compiled")


class PlatformWheel(bdist_wheel):
    """For any Python 3 on this platform."""

    def finalize_options(self) -> None:
        """It has machine code."""
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        """The kernels know nothing of Python."""
        return "py3", "none", super().get_tag()[2]


class WithMachineCode(Distribution):
    """A distribution for one platform."""

    def has_ext_modules(self) -> bool:
        """So that files go to the platform's folder."""
        return True


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel}, distclass=WithMachineCode)
