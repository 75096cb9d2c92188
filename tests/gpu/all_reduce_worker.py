"""One rank of test_all_reduce_cuda.py: sums and gathers in a CUDA graph that is replayed, beside sums in float64.

python all_reduce_worker.py RANK RANKS MEETING
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.exchange import exchange_bytes
from graphllm.ir.groups import TENSOR, group_of
from graphllm.ops.collectives.all_gather import all_gather
from graphllm.ops.collectives.all_reduce import all_reduce
from graphllm.ops.sampling.sample import sample
from graphllm.ops.sampling.sample_shares import sample_shares
from graphllm.runtime.ranks.groups import Meeting, joined
from graphllm.runtime.ranks.symmetric_memory import SymmetricGroup, method_for

WIDTH, REPLAYS = 4096, 12
ROWS = (1, 2, 3, 17, 64, 256, 1024, 8192)
LOGITS = (1, 33, 64)  # rows
SHARE = 16_411  # of a vocabulary, odd


def numbers(rank: int, replay: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a rank has in a replay: every rank can make them."""
    draw = torch.Generator(device="cuda").manual_seed(1000 * replay + rank)
    return torch.randn(shape, generator=draw, device="cuda", dtype=torch.float32).to(dtype)


def replayed(shape: tuple[int, ...], dtype: torch.dtype, run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What ``run`` of an x of that shape gives, by the replay of a graph with three such calls one behind the other,
    which share the buffer of the group."""
    x = torch.zeros(shape, dtype=dtype, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(x)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            first = run(x)
            run(x + 1)
            last = run(x)

    def replay(values: Tensor) -> Tensor:
        x.copy_(values)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(first, last)
        return last.clone()

    return replay


def check_sums(rank: int, ranks: int, rows: int, dtype: torch.dtype, impl: str) -> None:
    shape = (rows, WIDTH)
    run = replayed(shape, dtype, lambda x: all_reduce.impls[impl].fn(x=x, group=TENSOR, ranks=ranks))
    for replay in range(REPLAYS if rows <= 256 else 3):
        values = numbers(rank, replay, shape, dtype)
        if replay % ranks == rank:
            torch.cuda._sleep(2_000_000)  # one is late
        found = run(values)
        exact = sum(numbers(r, replay, shape, dtype).double() for r in range(ranks))
        assert isinstance(exact, Tensor)
        error = (found.double() - exact).abs().max().item() / exact.abs().max().item()
        assert error < {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-6}[dtype] * ranks, error
        others = [torch.empty_like(found) for _ in range(ranks)]
        torch.distributed.all_gather(others, found)
        assert all(torch.equal(found, other) for other in others), "ranks have different sums"


def check_gathers(rank: int, ranks: int, rows: int, dtype: torch.dtype) -> None:
    shape = (rows, SHARE)
    width = ranks * SHARE - 5
    gather = all_gather.impls["group"].fn
    run = replayed(shape, dtype, lambda x: gather(x=x, group=TENSOR, ranks=ranks, width=width))
    for replay in range(REPLAYS):
        found = run(numbers(rank, replay, shape, dtype))
        assert torch.equal(found, torch.cat([numbers(r, replay, shape, dtype) for r in range(ranks)], 1)[:, :width])


def check_samples(rank: int, ranks: int, rows: int) -> None:
    """The tokens of one GPU that has all logits, of greedy rows and of rows with and without filters."""
    width = ranks * SHARE - 5
    kinds = torch.arange(rows, device="cuda") % 7
    settings = {
        "temperature_S": torch.tensor([0.0, 1.0, 0.6, 0.8, 1.5, 0.7, 2.0], device="cuda")[kinds],
        "top_k_S": torch.tensor([0, 0, 20, 0, 0, 5, 0], dtype=torch.int32, device="cuda")[kinds],
        "top_p_S": torch.tensor([1.0, 1.0, 0.95, 0.9, 1.0, 1.0, 1.0], device="cuda")[kinds],
        "min_p_S": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.05, 0.0, 0.0], device="cuda")[kinds],
        "seed_S": torch.arange(rows, device="cuda") * 77,
        "sample_index_S": torch.arange(rows, dtype=torch.int32, device="cuda"),
    }
    sampled = sample_shares.impls["triton_sample_shares"].fn
    shape = (rows, SHARE)
    run = replayed(
        shape, torch.bfloat16, lambda x: sampled(logits_SN=x, **settings, ranks=ranks, width=width, rows=rows)
    )
    for replay in range(REPLAYS):
        if replay % ranks == rank:
            torch.cuda._sleep(2_000_000)  # one is late
        found = run(3 * numbers(rank, replay, shape, torch.bfloat16))
        whole = torch.cat([3 * numbers(r, replay, shape, torch.bfloat16) for r in range(ranks)], 1)[:, :width]
        assert torch.equal(found, sample.impls["triton_sample"].fn(logits_SV=whole, **settings))


def main() -> None:
    rank, ranks, meeting = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    with joined(rank, ranks, Meeting(f"file://{meeting}"), torch.device("cuda")):
        group = group_of(TENSOR, ranks)
        symmetric = isinstance(group, SymmetricGroup)
        print(f"rank {rank}: {type(group).__name__}", flush=True)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for rows in ROWS:
                check_sums(rank, ranks, rows, dtype, "group")
                if rows * WIDTH * dtype.itemsize <= exchange_bytes(ranks):
                    check_sums(rank, ranks, rows, dtype, "exchange")
                method = method_for(torch.empty((rows, WIDTH), dtype=dtype, device="meta"), ranks) if symmetric else ""
                print(f"rank {rank}: {rows} rows of {dtype}: {method}", flush=True)
        for rows in LOGITS:
            check_gathers(rank, ranks, rows, torch.bfloat16)
        for rows in (1, 7, 64, 256):
            check_samples(rank, ranks, rows)
            print(f"rank {rank}: {rows} rows sampled", flush=True)
        assert all_reduce(torch.empty(0, WIDTH, device="cuda"), TENSOR, ranks).shape == (0, WIDTH)


if __name__ == "__main__":
    main()
