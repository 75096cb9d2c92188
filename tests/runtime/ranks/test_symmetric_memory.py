"""What torch's symmetric memory is told of groups: a store that counts from 0 in a process that had groups before. The
memory itself needs GPUs: tests/gpu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore
from torch.distributed.distributed_c10d import _resolve_process_group

from graphllm.runtime.ranks import symmetric_memory
from graphllm.runtime.ranks.symmetric_memory import CountedFromZero
from tests.waiting import PATIENCE


def test_a_process_that_counted_on_finds_what_a_new_one_says() -> None:
    """torch's own stores call it, as torch does when ranks share memory: bytes under KIND/NUMBER/RANK."""
    common = HashStore()
    old = CountedFromZero(common)
    for number, payload in enumerate((b"\xff\x00\x80", b"second")):
        new = PrefixStore(f"CUDASymmetricMemory/{number}", common)
        new.set("1", payload)
        late = PrefixStore(f"CUDASymmetricMemory/{number + 7}", old)
        late.wait(["1"])
        late.set("0", payload[::-1])
        assert late.get("1") == payload
        assert late.multi_get(["0", "1"]) == [payload[::-1], payload]
        assert late.check(["0"])
        assert new.get("0") == payload[::-1]
        assert (late.add("count", 1), new.add("count", 1)) == (1, 2)


def _say(rank: int, folder: str, told: Any) -> None:
    """Rank 0 was in other groups before. What each rank's group of symmetric memory is called, and finds."""
    place = dist.FileStore(f"{folder}/meeting", 2)
    dist.init_process_group("gloo", store=place, rank=rank, world_size=2)
    cpu = torch.device("cpu")
    known = [symmetric_memory._name_of_its_own(dist.GroupMember.WORLD, cpu) for _ in range(1 + 2 * (1 - rank))]
    name = known[-1][0]
    group = _resolve_process_group(name)
    store = PrefixStore(f"CUDASymmetricMemory/{7 * (1 - rank)}", group.get_group_store())
    store.set(str(rank), f"from {rank}")
    x = torch.ones(3)
    group.allreduce([x]).wait()
    told.put((name, store.get(str(1 - rank)), group.rank(), group.size(), x.tolist()))
    dist.destroy_process_group()


@pytest.mark.thorough
def test_groups_of_a_process_have_names_of_their_own(tmp_path: Path) -> None:
    """Two processes, of which one was in two groups before: each resolves its group by name, as torch's kernels do."""
    context = torch.multiprocessing.get_context("spawn")
    told = context.Queue()
    ranks = [context.Process(target=_say, args=(rank, str(tmp_path), told)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = sorted(told.get(timeout=PATIENCE) for _ in ranks)
    for process in ranks:
        process.join()
    assert found == [
        ("0", b"from 0", 1, 2, [2.0] * 3),
        ("0 as group 2", b"from 1", 0, 2, [2.0] * 3),
    ]
