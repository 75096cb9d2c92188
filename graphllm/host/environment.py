"""What libraries read from the environment when they are loaded. `import graphllm` sets it: torch must come after."""

from __future__ import annotations

import os

_VALUES = {
    # Kernels of one parallel region wait for each other by spinning. Unbounded spinning collapses as soon as another
    # process takes one of the cores, so it is bounded before the OpenMP runtime is loaded. With a bound below the
    # host's time between two steps, which is some milliseconds after a pause, threads sleep and wake in every region:
    # 8 tokens of the embedded model took 38 ms with 20,000 spins, 5.5 with 60,000 (bench/notes/cpu_decode.md).
    "GOMP_SPINCOUNT": "60000",
    # Where there are more OpenMP threads than CPUs, a wait then spins 1,000 times and not 100: over the gaps in a step.
    "OMP_WAIT_POLICY": "active",
    # oneDNN and torch's layer above it keep a kernel for every shape they have met, 1,024 each, and steps have many
    # shapes: a gigabyte after some hours of serving.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "128",
}


def set_environment() -> None:
    """Set what the user has not set."""
    for name, value in _VALUES.items():
        os.environ.setdefault(name, value)
