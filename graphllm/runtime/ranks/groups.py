"""Process groups of this process: joined at its start, used by collective ops under their names."""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from graphllm.config import ConfigError
from graphllm.ir.groups import EXPERTS, TENSOR, Group, set_group, set_links
from graphllm.runtime.ranks.collectives import LibraryGroup
from graphllm.runtime.ranks.stage_links import StageLinks, link_directions

_PATIENCE = datetime.timedelta(minutes=10)  # a rank that waits longer for the others fails


class Meeting(NamedTuple):
    """Where ranks find each other.

    url: file:// and a file that does not exist yet, of ranks of one host, or tcp:// and the address of rank 0.
    listener: on rank 0, the file descriptor of the socket that listens there.
    """

    url: str
    listener: int | None = None

    def store(self, rank: int, degree: int) -> torch.distributed.Store:
        """What the library keeps there. Waits for rank 0."""
        kind, _, place = self.url.partition("://")
        if kind == "file":
            return torch.distributed.FileStore(place, degree)
        host, _, port = place.rpartition(":")
        return torch.distributed.TCPStore(
            host,
            int(port),
            degree,
            is_master=rank == 0,
            timeout=_PATIENCE,
            wait_for_workers=False,
            master_listen_fd=None if self.listener is None else os.dup(self.listener),  # it closes what it gets
        )


@contextmanager
def joined(
    rank: int, degree: int, meeting: Meeting, device: torch.device, stages: int = 1, one_host: bool = True
) -> Iterator[None]:
    """Be one rank of a tensor-parallel group, gloo on a CPU and NCCL on GPUs.

    device: of type cuda without a number it is the GPU of the rank's number, which becomes the current one.
    stages: of a pipeline; the ranks of each are consecutive, and a tensor-parallel group of their own.
    one_host: the ranks of each stage are on one host.
    """
    if device.type == "cuda":
        device = torch.device("cuda", rank if device.index is None else device.index)
        torch.cuda.set_device(device)
    members = _meet(rank, degree, meeting, device)
    if stages == 1:
        set_group(TENSOR, open_group(members, device, one_host))
    else:
        width = degree // stages
        stage_ranks = [range(first, first + width) for first in range(0, degree, width)]
        of_stage = _own_group(rank, stage_ranks)
        if width > 1:
            set_group(TENSOR, open_group(of_stage, device, one_host))
        set_links(_stage_links(rank, stages, width, device))
    try:
        yield
    finally:
        set_group(TENSOR, None)
        set_links(None)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def abandon() -> threading.Thread:
    """Give up all groups of this process on a GPU, since some of their ranks are gone. The library's kernels, which
    wait for these ranks, end. The returned thread ends when no captured graph holds a group: then the groups are
    left."""
    from torch.distributed.distributed_c10d import _abort_process_group

    thread = threading.Thread(target=_abort_process_group, name="graphllm-abandon", daemon=True)
    thread.start()
    return thread


@contextmanager
def joined_cores(
    rank: int, count: int, meeting: Meeting, device: torch.device
) -> Iterator[Callable[[list[int]], list[int]]]:
    """Be one of the engine cores that share experts, each of one rank. Yields a function that gives the largest of all
    cores' numbers at each place. It uses a group of its own, and the host waits for it."""
    own = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
    members = _meet(rank, count, meeting, own)
    set_group(EXPERTS, LibraryGroup(members))
    host = torch.distributed.new_group(backend="gloo", timeout=_PATIENCE)
    torch.distributed.all_reduce(torch.zeros(1, device=device), group=members)  # what the library takes is taken

    def most(numbers: list[int]) -> list[int]:
        said = torch.tensor(numbers, dtype=torch.int64)
        torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MAX, group=host)
        found: list[int] = said.tolist()
        return found

    try:
        yield most
    finally:
        set_group(EXPERTS, None)
        torch.distributed.destroy_process_group()


def _meet(rank: int, count: int, meeting: Meeting, device: torch.device) -> torch.distributed.ProcessGroup:
    """The group of all that meet there, gloo on a CPU and NCCL on GPUs; a GPU by its number."""
    on_gpu = device.type == "cuda"
    torch.distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=meeting.store(rank, count),
        rank=rank,
        world_size=count,
        timeout=_PATIENCE,
        device_id=device if on_gpu else None,
    )
    members = torch.distributed.group.WORLD
    assert members is not None
    return members


def _stage_links(rank: int, stages: int, width: int, device: torch.device) -> StageLinks:
    """Links from a rank to the ranks with its number in the other stages. width: ranks of a stage."""
    to: dict[int, torch.distributed.ProcessGroup] = {}
    origins: dict[int, torch.distributed.ProcessGroup] = {}
    own = rank // width
    for origin, target in link_directions(stages):
        for number in range(width):
            ends = [origin * width + number, target * width + number]
            group = torch.distributed.new_group(sorted(ends))  # every process must make all of them
            if rank in ends:
                if own == origin:
                    to[target] = group
                else:
                    origins[origin] = group
    return StageLinks(own, stages, to, origins, device)


def _own_group(rank: int, groups: Sequence[Sequence[int]]) -> torch.distributed.ProcessGroup:
    """The one of this rank; every process must make all of them."""
    made = [torch.distributed.new_group(list(ranks)) for ranks in groups]
    return next(group for group, ranks in zip(made, groups, strict=True) if rank in ranks)


def open_group(members: torch.distributed.ProcessGroup, device: torch.device, one_host: bool = True) -> Group:
    """The group of this process and others, each with its device. All of them must call this. On GPUs of one host small
    collectives go through symmetric memory. The library's communicator is made now, since it cannot be made while a
    graph is captured."""
    if device.type != "cuda":
        return LibraryGroup(members)
    from graphllm.runtime.ranks.symmetric_memory import SymmetricGroup, is_reachable

    torch.distributed.all_reduce(torch.zeros(1, device=device), group=members)
    if not one_host:
        raise ConfigError(
            f"tensor_parallel_size is {members.size()}: these ranks are on several machines, and GPUs sum through each "
            "other's memory; give tensor_parallel_size the GPUs of one machine, and pipeline_parallel_size the machines"
        )
    if is_reachable(members.size()):
        return SymmetricGroup(members, device)
    from graphllm.runtime.ranks.host_exchange import HostExchange

    return LibraryGroup(members, HostExchange(members, device))
