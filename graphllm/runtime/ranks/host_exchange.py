"""Exchange memory in the host's memory, for GPUs that cannot write into each other's: kernels reach it over the bus."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from graphllm.ir.exchange import buffer_bytes, exchange_table

_SHARED = Path("/dev/shm")


class HostExchange:
    """Of a group, which makes it together. device: this rank's. The table is valid for as long as this is there."""

    def __init__(self, members: dist.ProcessGroup, device: torch.device) -> None:
        rank, ranks = members.rank(), members.size()
        own = buffer_bytes(ranks)
        with _common_file(rank, ranks * own, members, device) as file:
            self.memory = torch.from_file(str(file), shared=True, size=ranks * own, dtype=torch.uint8)
            dist.barrier(members)  # before the file has no name any more
        if device.type == "cuda":
            code = torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), self.memory.numel(), 1)  # portable
            torch.cuda.check_error(int(code))
        self._own = self.memory.view(ranks, own)[rank]
        self._own.fill_(255)
        dist.barrier(members)  # nobody gives anything before all are empty
        places = [self.memory.data_ptr() + peer * own for peer in range(ranks)]
        self.table: Tensor = exchange_table(rank, places, device)

    def fill(self) -> None:
        """Have numbers wherever this rank waits for one."""
        self._own.zero_()


@contextmanager
def _common_file(rank: int, size: int, members: dist.ProcessGroup, device: torch.device) -> Iterator[Path]:
    """A file of that size which all ranks open: the first one makes it, and takes its name away in the end."""
    words = torch.zeros(64, dtype=torch.int64, device=device)
    with tempfile.NamedTemporaryFile(prefix="graphllm-exchange-", dir=_SHARED) if rank == 0 else nullcontext() as made:
        if made is not None:
            made.truncate(size)
            name = Path(made.name).name.encode()
            words[: len(name)] = torch.tensor(list(name), device=device)
        dist.broadcast(words, group=members, group_src=0)
        yield _SHARED / bytes(words.tolist()).rstrip(b"\0").decode()
