"""What the machine itself can do, measured in a process of its own: `python -m bench.cpu.machine THREADS`, JSON out."""

from __future__ import annotations

import json
import sys
import time

READ, GEMM, IMPORT = "memory read, GB/s", "bf16 matrix product, TFLOP/s", "import torch, s"
_SIZE = 1024, 896, 9728  # rows, inner, columns: of the largest product of the shape's prefill
_ROUNDS = 12


def main() -> None:
    """Measure it and print it."""
    begun = time.perf_counter()
    import torch

    imported = time.perf_counter() - begun
    torch.set_num_threads(int(sys.argv[1]))
    print(json.dumps({IMPORT: imported, READ: read_speed(), GEMM: product_speed()}))


def read_speed() -> float:
    """GB/s: the best of some sweeps over more memory than any cache holds."""
    from bench.cpu_kernels import POOL, huge, probe

    library, pool = probe(), huge(POOL)
    best = min(_seconds(lambda: library.probe_read(pool.data_ptr(), POOL)) for _ in range(_ROUNDS))
    return POOL / best / 1e9


def product_speed() -> float:
    """TFLOP/s of torch's bf16 product, the best of some."""
    import torch

    m, k, n = _SIZE
    a, b = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16()
    torch.mm(a, b)
    return 2 * m * k * n / min(_seconds(lambda: torch.mm(a, b)) for _ in range(_ROUNDS)) / 1e12


def _seconds(call: object) -> float:
    begun = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
