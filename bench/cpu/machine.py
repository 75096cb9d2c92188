"""What the machine itself can do: `python -m bench.cpu.machine THREADS`, a process that takes turns with the systems.

It answers its start with what a start and a product take, and every command with the speed of memory right then.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable

from bench.cpu.process import Commands

READ, GEMM, IMPORT = "memory read, GB/s", "bf16 matrix product, TFLOP/s", "import torch, s"
_SIZE = 1024, 896, 9728  # rows, inner, columns: of the largest product of the shape's prefill
_TIMES = 12
_LONG = 2.0  # seconds


def main() -> None:
    """Measure it whenever asked."""
    commands = Commands()
    begun = time.perf_counter()
    import torch

    imported = time.perf_counter() - begun
    torch.set_num_threads(int(sys.argv[1]))
    commands.answer({IMPORT: imported, GEMM: product_speed()})
    read = functools.cache(reader)  # its memory is filled when it is first asked for
    for _ in commands:
        commands.answer(read()())
    commands.answer({})


def reader() -> Callable[[], float]:
    """What gives GB/s: the median of some sweeps over more memory than any cache holds."""
    from bench.cpu_kernels import POOL, huge, probe

    library, pool = probe(), huge(POOL)
    return lambda: POOL / statistics.median(_seconds(lambda: library.probe_read(pool.data_ptr(), POOL))) / 1e9


def product_speed() -> float:
    """TFLOP/s of torch's bf16 product, the best of some."""
    import torch

    m, k, n = _SIZE
    a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    return 2 * m * k * n / min(_seconds(lambda: torch.nn.functional.linear(a, b))) / 1e12


def _seconds(call: Callable[[], object]) -> list[float]:
    """Of some calls, fewer where they take long."""
    found: list[float] = []
    while len(found) < _TIMES and sum(found) < _LONG:
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return found


if __name__ == "__main__":
    main()
