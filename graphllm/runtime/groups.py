"""Process groups of this process: joined at its start, used by collective ops under their names."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from graphllm.ir.groups import TENSOR, set_group

_PATIENCE = datetime.timedelta(minutes=10)  # a rank that waits longer for the others fails


@contextmanager
def joined(rank: int, degree: int, meeting: Path, device: torch.device) -> Iterator[None]:
    """Be one rank of a tensor-parallel group, gloo on a CPU and NCCL on GPUs. meeting: a file that does not exist yet,
    where the ranks of one machine find each other."""
    torch.distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=degree,
        timeout=_PATIENCE,
    )
    set_group(TENSOR, torch.distributed.group.WORLD)
    try:
        yield
    finally:
        set_group(TENSOR, None)
        torch.distributed.destroy_process_group()
