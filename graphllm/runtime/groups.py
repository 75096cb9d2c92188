"""Process groups of this process: joined at its start, used by collective ops under their names."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from graphllm.ir.groups import TENSOR, Group, set_group
from graphllm.runtime.collectives import LibraryGroup

_PATIENCE = datetime.timedelta(minutes=10)  # a rank that waits longer for the others fails


@contextmanager
def joined(rank: int, degree: int, meeting: Path, device: torch.device) -> Iterator[None]:
    """Be one rank of a tensor-parallel group, gloo on a CPU and NCCL on GPUs. meeting: a file that does not exist yet,
    where the ranks of one machine find each other. device: of type cuda without a number it is the GPU of the rank's
    number, which becomes the current one."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        device = torch.device("cuda", rank if device.index is None else device.index)
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=degree,
        timeout=_PATIENCE,
        device_id=device if on_gpu else None,
    )
    assert torch.distributed.group.WORLD is not None
    set_group(TENSOR, open_group(torch.distributed.group.WORLD, device))
    try:
        yield
    finally:
        set_group(TENSOR, None)
        torch.distributed.destroy_process_group()


def open_group(members: torch.distributed.ProcessGroup, device: torch.device) -> Group:
    """The group of some processes of which this is one, each with its device. All of them must call this. On GPUs of
    one host small collectives go through symmetric memory. The library's communicator is made now: it cannot be while
    a graph is captured."""
    if device.type != "cuda":
        return LibraryGroup(members)
    from graphllm.runtime.symmetric_memory import SymmetricGroup, is_reachable

    torch.distributed.all_reduce(torch.zeros(1, device=device), group=members)
    return SymmetricGroup(members, device) if is_reachable(members.size()) else LibraryGroup(members)
