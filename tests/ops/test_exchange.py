"""Kernels of several ranks that give each other numbers: processes with Triton's interpreter, any may be late;
and the process that builds them, which has no other."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from graphllm.ir.exchange import _alone
from graphllm.ir.groups import TENSOR, set_group
from graphllm.ops.collectives.all_reduce import all_reduce
from graphllm.ops.sampling.sample import sample
from graphllm.ops.sampling.sample_shares import sample_shares
from graphllm.runtime.ranks.collectives import LibraryGroup
from graphllm.runtime.ranks.host_exchange import HostExchange
from tests.tiers import draws, thorough
from tests.waiting import PATIENCE


@pytest.mark.parametrize("ranks", [2, thorough(4), pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_that_take_turns_in_being_late(ranks: int, tmp_path: Path) -> None:
    worker = Path(__file__).with_name("exchange_worker.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(ranks), str(tmp_path / "meeting"), str(draws(2, 12))],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = [p.communicate(timeout=PATIENCE)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.wait()
    assert all(text.endswith("same\n") for text in said), "\n".join(said)


def _wait_for_a_rank_that_is_gone(rank: int, meeting: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    group = LibraryGroup(dist.group.WORLD, HostExchange(dist.group.WORLD, torch.device("cpu")))
    set_group(TENSOR, group)
    if rank == 1:
        os._exit(0)
    ended = threading.Event()

    def let_go() -> None:
        while not ended.wait(0.05):
            group.let_go()

    thread = threading.Thread(target=let_go)
    thread.start()
    sums = [all_reduce.impls["exchange"].fn(x=torch.ones(2000) + call, ranks=2).tolist() for call in range(3)]
    ended.set()
    thread.join()
    results.put(sums)


@pytest.mark.thorough
def test_kernels_are_let_go_that_wait_for_a_rank_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros take the place of its numbers, in as many calls as there are."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = (str(tmp_path / "meeting"), results)
    processes = [context.Process(target=_wait_for_a_rank_that_is_gone, args=(r, *arguments)) for r in range(2)]
    for process in processes:
        process.start()
    assert results.get(timeout=PATIENCE) == [[1.0 + call] * 2000 for call in range(3)]
    for process in processes:
        process.join()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_alone_every_peer_gives_the_same(ranks: int, dtype: torch.dtype) -> None:
    """Where kernels are built and timed."""
    for shape in ((3, 7), (2, 2048)):  # what fits no group of numbers, and several programs
        x = torch.randn(shape).to(dtype)
        for _ in range(3):
            found = all_reduce.impls["exchange"].fn(x=x, ranks=ranks)
            torch.testing.assert_close(found, (x.float() * ranks).to(dtype), atol=0.01, rtol=0.002)
    assert (_alone(ranks, x.device)[1] == 255).all()


@pytest.mark.parametrize("ranks", [2, 4])
def test_alone_tokens_are_those_of_the_first_rank(ranks: int) -> None:
    """Also the last one of its share."""
    rows, share = 6, 40
    logits = torch.randn(rows, share)
    logits[:4, -1] = 50.0
    zeros, ones = torch.zeros(rows), torch.ones(rows)
    given = {
        "temperature_S": torch.tensor([0.0, 1.0] * 3), "top_k_S": zeros.int(), "top_p_S": ones, "min_p_S": zeros,
        "seed_S": torch.arange(rows), "sample_index_S": torch.arange(rows, dtype=torch.int32),
    }  # fmt: skip
    sample_alike = sample_shares.impls["triton_sample_shares"].fn
    found = sample_alike(logits_SN=logits, **given, ranks=ranks, width=ranks * share, rows=rows)
    assert torch.equal(found, sample.reference(logits, **given))
    assert found[:4].tolist() == [share - 1] * 4
    assert (_alone(ranks, logits.device)[1] == 255).all()
