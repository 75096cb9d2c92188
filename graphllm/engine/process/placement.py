"""Which of a machine's CPUs and GPUs each of several engine cores has. Imports nothing heavy."""

from __future__ import annotations

import os
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")


def gpus_of(rank: int, each: int) -> str:
    """CUDA_VISIBLE_DEVICES for core ``rank``: ``each`` of this process's GPUs, in order."""
    first, said = rank * each, os.environ.get("CUDA_VISIBLE_DEVICES")
    if said is None:
        return ",".join(map(str, range(first, first + each)))
    return ",".join(name.strip() for name in said.split(",")[first : first + each])


def cpus_of(rank: int, count: int) -> list[int]:
    """The CPUs of one of ``count`` engine cores: neighbours, as many for each, and both threads of a physical core for
    the same one. All of them where there are fewer CPUs than cores."""
    cpus = sorted(os.sched_getaffinity(0), key=_place)
    each = len(cpus) // count
    return sorted(cpus[rank * each : (rank + 1) * each] if each else cpus)


def _place(cpu: int) -> tuple[int, int, int]:
    """Socket, physical core, thread."""
    topology = _CPUS / f"cpu{cpu}" / "topology"
    try:
        socket, core = (int((topology / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):  # a virtual machine may not say
        return 0, cpu, cpu
    return socket, core, cpu
