"""What the machine itself can do: reads of memory and products, by the functions of probe.cpp. Needs AVX-512."""

from __future__ import annotations

import ctypes
import functools
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from graphllm.host.compiler import compiler_command
from graphllm.host.hugepages import zeros

POOL = 1200 << 20


@functools.cache
def probe() -> ctypes.CDLL:
    """The library of probe.cpp."""
    library = Path(tempfile.mkdtemp()) / "probe.so"
    subprocess.run(compiler_command([Path(__file__).with_name("probe.cpp")], library), check=True)
    out = ctypes.CDLL(str(library))
    out.probe_read.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    out.probe_read.restype = ctypes.c_int64
    out.probe_pages.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    out.probe_pages.restype = ctypes.c_int64
    out.probe_products.argtypes = [ctypes.c_int64]
    out.probe_products.restype = ctypes.c_double
    out.probe_region.argtypes = [ctypes.c_int64, ctypes.c_int64]
    out.probe_region.restype = ctypes.c_double
    return out


def huge(nbytes: int) -> torch.Tensor:
    """Bytes in huge pages, filled with small random bf16 numbers."""
    pool = torch.from_numpy(zeros(nbytes)).view(torch.bfloat16)
    for part in pool.split(16 << 20):
        part.normal_(0, 0.05)
    return pool


def turns(calls: Sequence[Callable[[int], object]], count: int, rounds: int) -> list[tuple[float, float]]:
    """Best and median seconds of each call; every round runs each of them ``count`` times with increasing numbers."""
    seconds: list[list[float]] = [[] for _ in calls]
    at = 0
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for _ in range(rounds):
        for times, call in zip(seconds, calls, strict=True):
            start = now()
            for i in range(count):
                call(at + i)
            times.append((now() - start) / count)
            at += count
    return [(min(times), statistics.median(times)) for times in seconds]


def reader(library: ctypes.CDLL, pool: torch.Tensor, nbytes: int) -> Callable[[int], object]:
    """A call for `turns` that reads ``nbytes``."""
    nbytes, base = nbytes // 64 * 64, pool.data_ptr()
    return lambda i: library.probe_read(base + i % (POOL // nbytes) * nbytes, nbytes)


def read_ceiling(pool: torch.Tensor) -> float:
    """GB/s."""
    ((best, _),) = turns([reader(probe(), pool, POOL)], 1, 12)
    return POOL / best / 1e9
