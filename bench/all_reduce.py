"""Sums over the GPUs of one host inside a CUDA graph, by size and method: what a step of tensor parallelism waits for.

    python bench/all_reduce.py [--ranks 2] [--out FILE.json]

us of one all-reduce of bf16: a graph of 64 of them, one behind the other, replayed; the mean of the median replay of
each rank. "used" is what a routine of the group takes for that size (`method_for`), "in place"
two-shot of what lies in shared memory already, "exchange" the kernel of the op `all_reduce`. norm: the sum, the
addition of a residual and the norm, by the group's fastest method and a kernel ("apart"), or in one kernel ("fused");
"alone" without the sum. gather: of logits [rows, 128,256 / ranks] from each rank. error: the largest of a sum, in parts
of the largest number, over replays with other numbers, before which one of the ranks is late.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

WIDTH, CALLS, REPLAYS, CHECKS = 4096, 64, 20, 6
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
GATHERED, VOCABULARY = (1, 8, 64, 256), 128_256
Row = dict[str, float | str]


def measure(rank: int, ranks: int, meeting: Path) -> dict[str, Row]:
    import torch
    import torch.distributed as dist
    from torch import Tensor

    from graphllm.ir.exchange import exchange_bytes
    from graphllm.ir.groups import SYMMETRIC_BYTES, TENSOR, group_of
    from graphllm.ops.collectives.all_reduce import all_reduce
    from graphllm.ops.gemm.fused_linear.triton_fused_linear import launch_norm
    from graphllm.runtime.ranks.collectives import LibraryGroup
    from graphllm.runtime.ranks.groups import Meeting, joined
    from graphllm.runtime.ranks.symmetric_memory import Method, SymmetricGroup, method_for

    def captured(run: Callable[[], Any], calls: int) -> Callable[[], None]:
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(calls):
                run()
        return graph.replay

    def timed(run: Callable[[], Any], calls: int = CALLS) -> float:
        replay, taken = captured(run, calls), []
        for turn in range(REPLAYS + 3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            dist.barrier()
            torch.cuda.synchronize()
            start.record(stream)
            replay()
            end.record(stream)
            end.synchronize()
            if turn >= 3:
                taken.append(1e3 * start.elapsed_time(end) / calls)
        mean = torch.tensor([statistics.median(taken)], device="cuda")
        dist.all_reduce(mean)
        return round(mean.item() / ranks, 2)

    def error(run: Callable[[], Any], x: Tensor, found: Tensor, residual: Tensor | None = None) -> float:
        """Of three calls in a graph whose input changes."""
        replay, worst = captured(run, 3), 0.0
        for turn in range(CHECKS):
            x.normal_()
            exact = x.double()
            dist.all_reduce(exact)
            if residual is not None:
                exact += residual.double()
            torch.cuda.synchronize()
            if turn % ranks == rank:
                torch.cuda._sleep(20_000_000)  # 10 ms
            replay()
            torch.cuda.synchronize()
            worst = max(worst, ((found.double() - exact).abs().max() / exact.abs().max()).item())
        return round(worst, 5)

    methods: tuple[Method, ...] = ("one-shot", "two-shot", "library")
    table: dict[str, Row] = {}
    with joined(rank, ranks, Meeting(f"file://{meeting}"), torch.device("cuda")):
        stream = torch.cuda.Stream()
        torch.cuda.set_stream(stream)
        group = group_of(TENSOR, ranks)
        if not isinstance(group, SymmetricGroup):
            sys.exit("these GPUs cannot read each other's memory")
        exchange = all_reduce.impls["exchange"].fn
        weight = torch.ones(WIDTH, dtype=torch.bfloat16, device="cuda")
        for rows in ROWS:
            x = torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device="cuda")
            out, normed, total = (torch.empty_like(x) for _ in range(3))
            residual, size = torch.randn_like(x), x.numel() * x.element_size()
            dist.broadcast(residual, 0)
            row: Row = {}
            for method in methods:
                if method == "library" or size <= SYMMETRIC_BYTES:
                    row[method] = timed(lambda m=method, x=x, out=out: group.all_reduce_by(m, x, out))
            if size <= SYMMETRIC_BYTES:
                lying = group._view(x)
                row["in place"] = timed(
                    lambda lying=lying: torch.ops.symm_mem.two_shot_all_reduce_(lying, "sum", group._name)
                )
            fastest = min(methods, key=lambda m: row.get(m, float("inf")))

            def apart(method: Method = fastest, x=x, out=out, normed=normed, total=total, residual=residual) -> None:
                group.all_reduce_by(method, x, out)
                launch_norm(out, weight, 1e-5, normed, 1, None, residual, total)

            def fused(x=x, normed=normed, total=total, residual=residual) -> None:
                launch_norm(x, weight, 1e-5, normed, 1, None, residual, total, ranks)

            def alone(x=x, normed=normed, total=total, residual=residual) -> None:
                launch_norm(x, weight, 1e-5, normed, 1, None, residual, total)

            if size <= exchange_bytes(ranks):
                row["exchange"] = timed(lambda x=x: exchange(x=x, ranks=ranks))
            row["norm apart"], row["norm alone"] = timed(apart), timed(alone)
            if size <= exchange_bytes(ranks):
                row["norm fused"] = timed(fused)
                sums: list[Tensor] = [out]

                def kept(x=x, sums=sums) -> None:
                    sums[0].copy_(exchange(x=x, ranks=ranks))

                row["error"] = error(kept, x, out)
                row["error fused"] = error(fused, x, total, residual)
            table[f"{size >> 10} KB"] = {**row, "used": method_for(x, ranks)}
            if rank == 0:
                print(f"{size >> 10} KB", table[f"{size >> 10} KB"], flush=True)
        for rows in GATHERED:
            x = torch.zeros(rows, VOCABULARY // ranks, dtype=torch.bfloat16, device="cuda")
            out, work = x.new_empty(rows, VOCABULARY), x.new_empty(ranks, *x.shape)
            table[f"gather {rows}"] = {
                "used": timed(lambda x=x, work=work, out=out: group.all_gather(x, work, out), 8),
                "library": timed(lambda x=x, work=work, out=out: LibraryGroup.all_gather(group, x, work, out), 8),
            }
        table["card"] = {"name": torch.cuda.get_device_name(), "torch": torch.__version__}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", nargs=2, metavar=("RANK", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        rank, folder = int(args.worker[0]), Path(args.worker[1])
        found = measure(rank, args.ranks, folder / "meeting")
        if rank == 0:
            (folder / "table.json").write_text(json.dumps(found))
        return
    with tempfile.TemporaryDirectory(prefix="graphllm-all-reduce-") as folder:
        command = [sys.executable, __file__, "--ranks", str(args.ranks), "--worker"]
        processes = [subprocess.Popen([*command, str(rank), folder]) for rank in range(args.ranks)]
        codes = [p.wait() for p in processes]
        if any(codes):
            sys.exit(f"ranks ended with {codes}")
        table = json.loads((Path(folder) / "table.json").read_text())
    for size, row in table.items():
        print(f"{size:>10}  " + "  ".join(f"{name} {value}" for name, value in row.items()))
    if args.out:
        args.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
