"""Calling compiled CPU kernels: every kind of argument arrives, one by one or joined, with other work between."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from graphllm.compile.codegen.calls import call_source
from graphllm.host.compiler import compiler_command
from graphllm.host.libraries import Libraries
from graphllm.runtime.kernels import CpuKernels, Launch

# Each appends the digits of its arguments to a number in memory, so order and values can be read from it.
KERNELS = """
#include <cstdint>
#include <initializer_list>
extern "C" void one(void* to, std::int64_t a) { auto* n = (std::int64_t*)to; *n = *n * 10 + a; }
extern "C" void many(std::int64_t a, double b, void* to, std::int64_t c, double d, std::int64_t e, std::int64_t f,
                     std::int64_t g, double h, const void* nothing) {
  auto* n = (std::int64_t*)to;
  for (double v : {double(a), b * 2, double(c), d * 2, double(e), double(f), double(g), h * 2, nothing ? 9. : 0.})
    *n = *n * 10 + std::int64_t(v);
}
"""
ARGUMENTS = {"one": ["ptr", "i64"], "many": ["i64", "f64", "ptr", "i64", "f64", "i64", "i64", "i64", "f64", "ptr"]}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> CpuKernels:
    folder: Path = tmp_path_factory.mktemp("kernels")
    (folder / "kernels.cpp").write_text(KERNELS)
    (folder / "calls.cpp").write_text(call_source(ARGUMENTS))
    subprocess.run(compiler_command([folder / "kernels.cpp", folder / "calls.cpp"], folder / "all.so"), check=True)
    return CpuKernels(Libraries([folder / "all.so"]))


def test_arguments_and_order(kernels: CpuKernels) -> None:
    number = ctypes.c_int64()
    at = ctypes.addressof(number)

    def python() -> None:
        number.value = number.value * 10 + 7

    def one(digit: int) -> Launch:
        return kernels.bind({"args": ARGUMENTS["one"]}, "one", [at, digit])

    launches: list[Launch] = [
        one(8),
        kernels.bind({"args": ARGUMENTS["many"]}, "many", [1, 1.0, at, 3, 2.0, 5, 6, 7, 4.0, None]),
        python,
        python,
        one(5),
        one(-1),
    ]
    joined = kernels.join(launches)
    assert len(joined) == 4
    for run in (launches, joined, joined):
        number.value, before = 0, kernels.done
        for launch in run:
            launch()
        assert kernels.done == before + 4
        assert number.value == 812345678077 * 100 + 50 - 1


def test_nothing_to_join() -> None:
    assert CpuKernels(Libraries()).join([]) == []
    assert CpuKernels(Libraries()).done == 0
