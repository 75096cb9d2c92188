"""The elementary functions of generated kernels, at every vector width, against float64."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

from graphllm.host.compiler import compiler_command
from graphllm.host.kernel_sources import OPS
from tests.ops.levels import X86

SOURCE = """
#include "cpu/elementary.cpp"
#ifdef __AVX512F__
extern "C" void wide(int which, const float* x, float* y, long count) {
  for (long i = 0; i < count; i += 16) {
    const __m512 v = _mm512_loadu_ps(x + i);
    _mm512_storeu_ps(y + i, which == 0 ? Sleef_expf16_u10(v) : which == 1 ? Sleef_sinf16_u35(v) : Sleef_cosf16_u35(v));
  }
}
#endif
extern "C" void narrow(int which, const float* x, float* y, long count) {
  for (long i = 0; i < count; i += 8) {
    const __m256 v = _mm256_loadu_ps(x + i);
    _mm256_storeu_ps(y + i, which == 0 ? Sleef_expf8_u10(v) : which == 1 ? Sleef_sinf8_u35(v) : Sleef_cosf8_u35(v));
  }
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    info = Path("/proc/cpuinfo")
    if not (X86 and info.exists() and " avx2 " in info.read_text()):
        pytest.skip("needs AVX2")
    folder = tmp_path_factory.mktemp("elementary")
    (folder / "all.cpp").write_text(SOURCE)
    subprocess.run([*compiler_command([folder / "all.cpp"], folder / "all.so"), f"-I{OPS}"], check=True)
    return ctypes.CDLL(str(folder / "all.so"))


@pytest.mark.parametrize("width", ["narrow", "wide"])
@pytest.mark.parametrize(
    ("which", "low", "high"),
    [("exp", -1.0, 1.0), ("exp", -87.0, 88.7), ("exp", -120.0, 100.0), ("sin", -10.0, 10.0), ("cos", -10.0, 10.0),
     ("sin", 0.0, 2e6), ("cos", 0.0, 2e6)],
)  # fmt: skip
def test_within_a_unit_in_the_last_place(library: ctypes.CDLL, width: str, which: str, low: float, high: float) -> None:
    if not hasattr(library, width):
        pytest.skip("needs AVX-512")
    x = np.random.default_rng(0).uniform(low, high, 1 << 18).astype(np.float32)
    x[:16] = [0.0, -0.0, low, high, *[np.nan] * 12]
    y = np.empty_like(x)
    pointers = (a.ctypes.data_as(ctypes.c_void_p) for a in (x, y))
    getattr(library, width)(("exp", "sin", "cos").index(which), *pointers, ctypes.c_long(len(x)))
    assert np.isnan(y[4:16]).all()
    with np.errstate(over="ignore", under="ignore"):
        wanted = getattr(np, which)(x.astype(np.float64))
        rounded = wanted.astype(np.float32)
    there = np.isfinite(rounded)
    assert np.array_equal(y[np.isinf(rounded)], rounded[np.isinf(rounded)])
    # Numbers below the smallest normal one may be flushed.
    unit = np.spacing(np.maximum(np.abs(rounded), np.finfo(np.float32).tiny))[there]
    assert (np.abs(y[there] - wanted[there]) / unit).max() <= (1.0 if which == "exp" else 0.51)
