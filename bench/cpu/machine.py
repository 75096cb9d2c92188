"""What the machine itself can do: `python -m bench.cpu.machine THREADS`, a process that takes turns with the systems.

It answers its start with what a start and a product take, and every command with the speed of memory right then.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable

from bench.process import Commands

READ, PRODUCTS, IMPORT = "memory read, GB/s", "products of the first-level cache, TFLOP/s", "import torch, s"
_TIMES = 12
_ROUNDS = 20000  # of the loop of products


def main() -> None:
    """Measure it whenever asked."""
    commands = Commands()
    begun = time.perf_counter()
    import torch

    imported = time.perf_counter() - begun
    torch.set_num_threads(int(sys.argv[1]))
    commands.answer({IMPORT: imported, PRODUCTS: product_speed()})
    read = functools.cache(reader)  # its memory is filled when it is first asked for
    for _ in commands:
        commands.answer(read()())
    commands.answer({})


def reader() -> Callable[[], float]:
    """What gives GB/s of some sweeps over more memory than any cache holds, in all."""
    from bench.probe import POOL, huge, probe

    library, pool = probe(), huge(POOL)
    return lambda: _TIMES * POOL / sum(_seconds(lambda: library.probe_read(pool.data_ptr(), POOL))) / 1e9


def product_speed() -> float:
    """TFLOP/s of a loop of bfloat16 products, the best of some."""
    from bench.probe import probe

    library = probe()
    operations = library.probe_products(_ROUNDS)
    return operations / min(_seconds(lambda: library.probe_products(_ROUNDS))) / 1e12


def _seconds(call: Callable[[], object]) -> list[float]:
    found = []
    for _ in range(_TIMES):
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return found


if __name__ == "__main__":
    main()
