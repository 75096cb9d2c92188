"""Sums over the GPUs of one host inside a CUDA graph, by size and method: what a step of tensor parallelism waits for.

    python bench/all_reduce.py [--ranks 2] [--out FILE.json]

us of one all-reduce of bf16: a graph of 64 of them, one behind the other, replayed; the mean of the median replay of
each rank. "used" is what a step takes for that size (`graphllm.runtime.symmetric_memory.method_for`). gather: of logits
[rows, 64,128] from each rank.
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

WIDTH, CALLS, REPLAYS = 4096, 64, 30
ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
GATHERED, SHARE = (1, 8, 64), 64_128


def measure(rank: int, ranks: int, meeting: Path) -> dict[str, dict[str, float | str]]:
    import torch
    import torch.distributed as dist
    from torch import Tensor

    from graphllm.ir.groups import SYMMETRIC_BYTES, TENSOR, group_of
    from graphllm.runtime.groups import Meeting, joined
    from graphllm.runtime.symmetric_memory import Method, SymmetricGroup, method_for

    def timed(run: Callable[[], None], calls: int = CALLS) -> float:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(calls):
                    run()
            taken = []
            for replay in range(REPLAYS + 5):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                dist.barrier()
                start.record(stream)
                graph.replay()
                end.record(stream)
                end.synchronize()
                if replay >= 5:
                    taken.append(1e3 * start.elapsed_time(end) / calls)
        mean = torch.tensor([statistics.median(taken)], device="cuda")
        dist.all_reduce(mean)
        return round(mean.item() / ranks, 2)

    def summing(group: SymmetricGroup, method: Method, x: Tensor, out: Tensor) -> Callable[[], None]:
        return lambda: group.all_reduce_by(method, x, out)

    methods: tuple[Method, ...] = ("one-shot", "two-shot", "library")
    table: dict[str, dict[str, float | str]] = {}
    with joined(rank, ranks, Meeting(f"file://{meeting}"), torch.device("cuda")):
        group = group_of(TENSOR, ranks)
        if not isinstance(group, SymmetricGroup):
            sys.exit("these GPUs cannot read each other's memory")
        for rows in ROWS:
            x = torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device="cuda")
            out, size = torch.empty_like(x), x.numel() * x.element_size()
            row: dict[str, float | str] = {
                m: timed(summing(group, m, x, out)) for m in methods if m == "library" or size <= SYMMETRIC_BYTES
            }
            table[f"{size >> 10} KB"] = {**row, "used": method_for(x, ranks)}
        for rows in GATHERED:
            x = torch.zeros(rows, SHARE, dtype=torch.bfloat16, device="cuda")
            out, work = x.new_empty(rows, ranks * SHARE), x.new_empty(ranks, rows, SHARE)
            table[f"gather {rows}"] = {
                "used": timed(lambda x=x, work=work, out=out: group.all_gather(x, work, out), 8),  # type: ignore[misc]
                "library": timed(
                    lambda x=x, work=work, out=out: super(SymmetricGroup, group).all_gather(x, work, out),
                    8,  # type: ignore[misc]
                ),
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
