"""Sums over the GPUs of one host inside a CUDA graph, by size and method: what a step of tensor parallelism waits for.

us of one all-reduce of bf16: a graph of 64 of them, one after the other, replayed; the mean of the median replay of
each rank. "used" is what a routine of the group takes for that size (`method_for`), "in place"
two-shot of what lies in shared memory already, "exchange" the kernel of the op `all_reduce`. norm: the sum, the
addition of a residual and the norm, by the group's fastest method and a kernel ("apart"), or in one kernel ("fused");
"only" without the sum. gather: of logits [rows, 128,256 / ranks] from each rank. error: the largest of a sum, in parts
of the largest number, over replays with other numbers, before which one of the ranks is late.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness import Case, worker_command, worker_environment

if TYPE_CHECKING:
    from torch import Tensor

CASES = [("all_reduce", {"ranks": 2})]
HELP = {"ranks": "GPUs"}
WIDTH, CALLS, REPLAYS, CHECKS = 4096, 64, 20, 6
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
GATHERED, VOCABULARY = (1, 8, 64, 256), 128_256
Row = dict[str, float | str]
METHODS = ("one-shot", "two-shot", "library")


class Rank:
    """One rank of the group: what it times, and how wrong its sums are."""

    def __init__(self, rank: int, ranks: int) -> None:
        import torch

        self.rank, self.ranks, self.stream = rank, ranks, torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)

    def captured(self, run: Callable[[], Any], calls: int) -> Callable[[], None]:
        """A graph of calls, one after the other."""
        import torch

        run()
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            for _ in range(calls):
                run()
        return graph.replay

    def timed(self, run: Callable[[], Any], calls: int = CALLS) -> float:
        """us of a call: the mean over ranks of the median replay."""
        import torch
        import torch.distributed as dist

        replay, taken = self.captured(run, calls), []
        for turn in range(REPLAYS + 3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            dist.barrier()
            torch.cuda.synchronize()
            start.record(self.stream)
            replay()
            end.record(self.stream)
            end.synchronize()
            if turn >= 3:
                taken.append(1e3 * start.elapsed_time(end) / calls)
        mean = torch.tensor([statistics.median(taken)], device="cuda")
        dist.all_reduce(mean)
        return round(mean.item() / self.ranks, 2)

    def error(self, run: Callable[[], Any], x: Tensor, found: Tensor, residual: Tensor | None = None) -> float:
        """Of three calls in a graph with an input that changes."""
        import torch
        import torch.distributed as dist

        replay, worst = self.captured(run, 3), 0.0
        for turn in range(CHECKS):
            x.normal_()
            exact = x.double()
            dist.all_reduce(exact)
            if residual is not None:
                exact += residual.double()
            torch.cuda.synchronize()
            if turn % self.ranks == self.rank:
                torch.cuda._sleep(20_000_000)  # 10 ms
            replay()
            torch.cuda.synchronize()
            worst = max(worst, ((found.double() - exact).abs().max() / exact.abs().max()).item())
        return round(worst, 5)

    def sums(self, group: Any, rows: int) -> tuple[str, Row]:
        """The name of a size, and its row."""
        import torch
        import torch.distributed as dist

        from graphllm.ir.exchange import exchange_bytes
        from graphllm.ir.groups import SYMMETRIC_BYTES
        from graphllm.ops.collectives.all_reduce import all_reduce
        from graphllm.ops.gemm.fused_linear.triton_fused_linear import launch_norm
        from graphllm.runtime.ranks.symmetric_memory import method_for

        exchange, ranks = all_reduce.impls["exchange"].fn, self.ranks
        weight = torch.ones(WIDTH, dtype=torch.bfloat16, device="cuda")
        x = torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device="cuda")
        out, normed, total = (torch.empty_like(x) for _ in range(3))
        residual, size = torch.randn_like(x), x.numel() * x.element_size()
        dist.broadcast(residual, 0)
        row: Row = {}
        for method in METHODS:
            if method == "library" or size <= SYMMETRIC_BYTES:
                row[method] = self.timed(lambda m=method: group.all_reduce_by(m, x, out))
        if size <= SYMMETRIC_BYTES:
            lying = group._view(x)
            row["in place"] = self.timed(lambda: torch.ops.symm_mem.two_shot_all_reduce_(lying, "sum", group._name))
        fastest = min(METHODS, key=lambda m: row.get(m, float("inf")))

        def apart() -> None:
            group.all_reduce_by(fastest, x, out)
            launch_norm(out, weight, 1e-5, normed, 1, None, residual, total)

        def fused() -> None:
            launch_norm(x, weight, 1e-5, normed, 1, None, residual, total, ranks)

        def norm_only() -> None:
            launch_norm(x, weight, 1e-5, normed, 1, None, residual, total)

        def kept() -> None:
            out.copy_(exchange(x=x, ranks=ranks))

        if size <= exchange_bytes(ranks):
            row["exchange"] = self.timed(lambda: exchange(x=x, ranks=ranks))
        row["norm apart"], row["norm only"] = self.timed(apart), self.timed(norm_only)
        if size <= exchange_bytes(ranks):
            row["norm fused"] = self.timed(fused)
            row["error"] = self.error(kept, x, out)
            row["error fused"] = self.error(fused, x, total, residual)
        return f"{size >> 10} KB", {**row, "used": method_for(x, ranks)}

    def gather(self, group: Any, rows: int) -> Row:
        """Of logits."""
        import torch

        from graphllm.runtime.ranks.collectives import LibraryGroup

        x = torch.zeros(rows, VOCABULARY // self.ranks, dtype=torch.bfloat16, device="cuda")
        out, work = x.new_empty(rows, VOCABULARY), x.new_empty(self.ranks, *x.shape)
        return {
            "used": self.timed(lambda: group.all_gather(x, work, out), 8),
            "library": self.timed(lambda: LibraryGroup.all_gather(group, x, work, out), 8),
        }


def measure(rank: int, ranks: int, meeting: str) -> dict[str, Row]:
    """All rows, in the process of a rank."""
    import torch

    from graphllm.ir.groups import TENSOR, group_of
    from graphllm.runtime.ranks.groups import Meeting, joined
    from graphllm.runtime.ranks.symmetric_memory import SymmetricGroup

    table: dict[str, Row] = {}
    with joined(rank, ranks, Meeting(f"file://{meeting}"), torch.device("cuda")):
        own, group = Rank(rank, ranks), group_of(TENSOR, ranks)
        if not isinstance(group, SymmetricGroup):
            sys.exit("these GPUs cannot read each other's memory")
        for rows in ROWS:
            size, row = own.sums(group, rows)
            table[size] = row
            if rank == 0:
                print(size, row, flush=True)
        for rows in GATHERED:
            table[f"gather {rows}"] = own.gather(group, rows)
    return table


def run(case: Case) -> dict[str, Row]:
    """A row for each size, from the first rank."""
    with tempfile.TemporaryDirectory(prefix="graphllm-all-reduce-") as folder:
        processes = [
            subprocess.Popen(
                worker_command("call", measure, rank, case.ranks, Path(folder, "meeting")),
                stdout=subprocess.PIPE, text=True, env=worker_environment(),
            )
            for rank in range(case.ranks)
        ]  # fmt: skip
        tables = [process.communicate()[0] for process in processes]
    codes = [process.returncode for process in processes]
    if any(codes):
        sys.exit(f"ranks ended with {codes}")
    found: dict[str, Row] = json.loads(tables[0])
    return found
