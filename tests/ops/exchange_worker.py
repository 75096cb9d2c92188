"""One rank of test_exchange.py: kernels that give each other numbers through the host's memory, by Triton's
interpreter.

TRITON_INTERPRET=1 python exchange_worker.py RANK RANKS MEETING CALLS
"""

from __future__ import annotations

import random
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor

from graphllm.ir.groups import TENSOR, set_group
from graphllm.ops.collectives.all_reduce import all_reduce
from graphllm.ops.collectives.all_reduce.triton_exchange import one_trip
from graphllm.ops.gemm.linear_add_norm import linear_add_norm
from graphllm.ops.sampling.sample import sample
from graphllm.ops.sampling.sample_shares import sample_shares
from graphllm.runtime.ranks.collectives import LibraryGroup
from graphllm.runtime.ranks.host_exchange import HostExchange

ROWS, WIDTH, INNER = (1, 3, 2), 40, 64
WIDE = 4096  # of the calls with numbers that take two trips


def numbers(rank: int, call: int, *shape: int) -> Tensor:
    """What a rank has in a call: every rank can make them."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(1000 * call + rank))
    made[0, 0] = float("nan") if call == 5 else made[0, 0]
    return made.bfloat16()


def check_sum(rank: int, ranks: int, call: int, rows: int, width: int) -> Tensor:
    found = all_reduce.impls["exchange"].fn(x=numbers(rank, call, rows, width), ranks=ranks)
    parts = [numbers(r, call, rows, width).float() for r in range(ranks)]
    exact = torch.stack(parts).sum(0)
    torch.testing.assert_close(found.float(), exact, atol=0.05, rtol=0.01, equal_nan=True)
    return found


def check_norm(rank: int, ranks: int, call: int, rows: int, width: int) -> Tensor:
    residual, norm = numbers(100, call + 100, rows, width), numbers(101, 0, 1, width)[0]
    weights = [numbers(r, 200, width, INNER) * 0.1 for r in range(ranks)]
    xs = [numbers(r, call + 100, rows, INNER) for r in range(ranks)]
    name = "triton_row" if rows == 1 else ("triton_tile", "cublas")[call // 2 % 2 or width == WIDE]
    config = {"triton_row": {"block_n": 4, "block_k": 64, "warps": 4}, "cublas": {}}.get(name)
    if config is None:
        config = {"block_t": 16, "block_n": 32, "block_k": 64, "splits": 1, "warps": 4, "stages": 1, "token_tiles": 1,
                  "direct": 0, "norm": 0, "low_rows": 16, "low_splits": 1}  # fmt: skip
    given = linear_add_norm.bind((xs[rank], weights[rank], residual, norm, 1e-5), {"ranks": ranks})
    total, normed = linear_add_norm.impls[name].fn(**given, **config)
    exact = residual.float() + sum(x.float() @ w.float().T for x, w in zip(xs, weights, strict=True))
    torch.testing.assert_close(total.float(), exact, atol=0.1, rtol=0.01)
    scaled = exact * torch.rsqrt((exact * exact).mean(-1, keepdim=True) + 1e-5) * norm.float()
    torch.testing.assert_close(normed.float(), scaled, atol=0.1, rtol=0.02)
    return total


def check_same(found: Tensor) -> None:
    """All ranks have the same bits."""
    own = found.view(torch.uint8)
    others = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(others, own)
    assert all(torch.equal(own, other) for other in others)


def check_sample(rank: int, ranks: int, call: int) -> None:
    """The tokens of `sample` of all logits; where many rows may come, a row's go over in several turns."""
    rows, share = (4, 3000) if call % 2 else (6, 900)
    width = ranks * share - 11
    logits = torch.cat([3 * numbers(r, call + 300, rows, share).nan_to_num() for r in range(ranks)], 1)[:, :width]
    own = torch.full((rows, share), 50.0).bfloat16()  # what pads the last one's is no token
    own[:, : min(share, width - rank * share)] = logits[:, rank * share : rank * share + share]
    at = [(call + row) % 7 for row in range(rows)]
    filters = {
        "temperature_S": torch.tensor([0.0, 1.0, 0.6, 0.8, 1.5, 0.7, 2.0])[at],
        "top_k_S": torch.tensor([0, 0, 20, 0, 0, 5, 0], dtype=torch.int32)[at],
        "top_p_S": torch.tensor([1.0, 1.0, 0.95, 0.9, 1.0, 1.0, 1.0])[at],
        "min_p_S": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.05, 0.0, 0.0])[at],
        "seed_S": torch.arange(rows) * 77 + call,
        "sample_index_S": torch.arange(rows, dtype=torch.int32),
    }
    given = {"logits_SN": own, **filters, "ranks": ranks, "width": width}
    found = sample_shares.impls["triton_sample_shares"].fn(**given, rows=2048 if call % 4 else rows)
    assert torch.equal(found, sample.reference(logits, **filters)), (call, at)


def main() -> None:
    rank, ranks = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=ranks)
    assert dist.group.WORLD is not None
    host = HostExchange(dist.group.WORLD, torch.device("cpu"))
    set_group(TENSOR, LibraryGroup(dist.group.WORLD, host))
    late = random.Random(rank)
    many = one_trip(ranks, 2) // WIDE + 2 if ranks > 2 else 2
    calls = int(sys.argv[4])
    sizes = [(ROWS[call % len(ROWS)], WIDTH) for call in range(calls)]
    sizes += [(rows, WIDE) for rows in ((many,) if calls < 10 else (many, many, 1, 2))]
    sums = []
    for call, (rows, width) in enumerate(sizes):
        time.sleep(late.random() * 0.05)
        sums.append((check_norm if call % 2 else check_sum)(rank, ranks, call, rows, width))
        if call % 2:
            check_sample(rank, ranks, call // 2)
    for found in sums:
        check_same(found)
    assert (host.memory == 255).all()  # as it was
    print("same", flush=True)


if __name__ == "__main__":
    main()
