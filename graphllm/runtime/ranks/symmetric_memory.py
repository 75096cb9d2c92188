"""The one place that touches torch's private symmetric memory: collectives of GPUs of one host that read each other's
memory, without the library's latency.

Each rank has a buffer that the others see. One-shot: everyone reads all of everyone's and adds up, in one kernel.
Two-shot: everyone adds up a part, then reads the others' sums. NVLink multicast stays off. Every kernel ends when all
ranks have read what it needs, so the next one may write the buffer. What they are slower for goes through NCCL.
What kernels exchange themselves (`graphllm.ir.exchange`) has memory of its own.

torch keeps a group by its name for as long as the process lives, and numbers the messages about shared memory through
all groups of a process. The other ranks of a second engine are new processes that count from 0, so this process would
wait for messages that never come. So each group after the first one gets a name of its own, and a store that counts
from 0.
"""

from __future__ import annotations

import itertools
import os
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from graphllm.ir.exchange import buffer_bytes, exchange_table
from graphllm.ir.groups import SYMMETRIC_BYTES
from graphllm.runtime.ranks.collectives import LibraryGroup, place_share

Method = Literal["one-shot", "two-shot", "library"]

_DTYPES = (torch.bfloat16, torch.float32)
# By the sizes of groups that torch's kernels are made for: bytes up to which one-shot is taken, and between which
# two-shot is. Two and four ranks as measured (all_reduce.json of bench/results/h200-x2); eight are not measured.
_ONE_SHOT = {2: 1 << 20, 4: 512 << 10, 8: 128 << 10}
_TWO_SHOT = {2: (1 << 20, 32 << 20), 4: (512 << 10, 32 << 20), 8: (128 << 10, 32 << 20)}
_FEW_GATHERED = 128 << 10  # bytes that the library gathers sooner, and of more than two ranks any number
_ALIGNED = 16  # bytes that a thread moves at a time
_AT_ONCE = 1 << 20  # bytes that are filled at a time
_PATIENCE = timedelta(minutes=5)  # until the others share their memory


def is_reachable(size: int) -> bool:
    """Whether the GPUs of a group of that size, the first ones that this process sees, can read each other's memory."""
    if torch.cuda.device_count() < size:
        return False
    pairs = ((a, b) for a in range(size) for b in range(size) if a != b)
    return all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)


def method_for(x: Tensor, size: int) -> Method:
    """How x is summed over a group of that size."""
    nbytes = x.numel() * x.element_size()
    aligned = x.storage_offset() * x.element_size() % _ALIGNED == 0 and nbytes % 4 == 0
    if x.dtype not in _DTYPES or not aligned or size not in _ONE_SHOT:
        return "library"
    if nbytes <= _ONE_SHOT[size]:
        return "one-shot"
    least, most = _TWO_SHOT[size]
    return "two-shot" if least < nbytes <= most else "library"


_groups = itertools.count()  # that this process has been in
_BACKENDS = {"cuda": dist.ProcessGroup.BackendType.NCCL, "cpu": dist.ProcessGroup.BackendType.GLOO}


class CountedFromZero(dist.Store):
    """Wraps a store and renumbers the NUMBER in KIND/NUMBER/... keys, starting from 0 in the order of first use."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}

    def _key(self, key: str) -> str:
        kind, number, *rest = key.split("/")
        return "/".join((kind, str(self._numbers.setdefault(number, len(self._numbers))), *rest))

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._key(key))

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._key(key), value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check([self._key(key) for key in keys])

    def wait(self, keys: list[str], timeout: timedelta = _PATIENCE) -> None:
        self._store.wait([self._key(key) for key in keys], timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._store.multi_get([self._key(key) for key in keys])


class SymmetricGroup(LibraryGroup):
    """GPUs of one host. device: this rank's. All ranks must make it at the same time."""

    def __init__(self, members: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(members)
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # read when memory is shared
        self._name, self._named = _name_of_its_own(members, device)
        self._buffer, self._shared = self._shared_memory(SYMMETRIC_BYTES, device)
        self._given, others = self._shared_memory(buffer_bytes(self.size), device)
        self._given.fill_(255)
        self._zeros = torch.zeros(_AT_ONCE, dtype=torch.uint8, pin_memory=True)
        self._ones = torch.ones(self._shared.signal_pad_size // 4, dtype=torch.int32, pin_memory=True)
        self._copy_stream = torch.cuda.Stream(device)
        torch.cuda.synchronize()
        places = [others.get_buffer(rank, (1,), torch.uint8).data_ptr() for rank in range(self.size)]
        self.exchange = exchange_table(self.rank, places, device)
        dist.barrier(members)  # nobody gives anything before all are empty
        torch.cuda.synchronize()

    def _shared_memory(self, nbytes: int, device: torch.device) -> tuple[Tensor, Any]:
        """Bytes that the others see, and their places; all ranks make as many at the same time."""
        import torch.distributed._symmetric_memory as symm_mem

        buffer = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
        return buffer, symm_mem._SymmetricMemory.rendezvous(buffer, self._name)

    def all_reduce(self, x: Tensor, out: Tensor) -> None:
        if x.numel():
            self.all_reduce_by(method_for(x, self.size), x, out)

    def all_reduce_by(self, method: Method, x: Tensor, out: Tensor) -> None:
        """The sum by a method, which must be able to: for measurements."""
        if method == "library":
            super().all_reduce(x, out)
            return
        shared = self._view(x)
        if method == "one-shot":
            torch.ops.symm_mem.one_shot_all_reduce_copy_out(shared, x, "sum", self._name, out)
        else:
            shared.copy_(x)
            torch.ops.symm_mem.two_shot_all_reduce_out(shared, "sum", self._name, out)

    def all_gather(self, x: Tensor, work: Tensor, out: Tensor) -> None:
        if not x.numel():
            return
        if self.size > 2 or not _FEW_GATHERED < x.numel() * x.element_size() <= SYMMETRIC_BYTES:
            super().all_gather(x, work, out)
            return
        self._view(x).copy_(x)
        self._shared.barrier(channel=0)
        for rank in range(self.size):
            own = rank == self.rank
            place_share(out, rank, x if own else self._shared.get_buffer(rank, tuple(x.shape), x.dtype))
        self._shared.barrier(channel=0)

    def let_go(self) -> None:
        """Release waiting kernels. Copy engines do it, since waiting kernels may have all multiprocessors. torch's
        kernels wait for words of this rank to be 1, and for words of the others to be 0."""
        free = self._zeros[: self._ones.nbytes].view(torch.int32)
        with torch.cuda.stream(self._copy_stream):
            for part in self._given.split(_AT_ONCE):
                part.copy_(self._zeros, non_blocking=True)
            for rank in range(self.size):
                words = self._shared.get_signal_pad(rank, tuple(free.shape), torch.int32)
                words.copy_(self._ones if rank == self.rank else free, non_blocking=True)

    def _view(self, x: Tensor) -> Tensor:
        """The beginning of this rank's buffer as a tensor like x."""
        return self._buffer[: x.numel() * x.element_size()].view(x.dtype).view(x.shape)


def _name_of_its_own(members: dist.ProcessGroup, device: torch.device) -> tuple[str, object]:
    """A name by which torch finds the group, and which none had in this process, and what must live as long as the
    group: torch keeps no group for its name, and of a store that is Python's only what is C++."""
    number = next(_groups)
    if not number:
        return members.group_name, members
    name = dist.distributed_c10d.GroupName(f"{members.group_name} as group {number}")
    store = CountedFromZero(dist.distributed_c10d._get_process_group_store(members))
    group = dist.ProcessGroup(store, members.rank(), members.size())
    group._register_backend(device, _BACKENDS[device.type], members._get_backend(device))
    dist.distributed_c10d._register_process_group(name, group)
    return name, (group, store)
