"""`python -m bench cpu`: graphllm beside every system it finds installed, on one model, in turn.

Writes a checkpoint of random weights in the shape of Qwen2.5-0.5B, or another of bench/real_size.py, and converts it
for each system. Then every round
starts the systems of the same bits in fresh processes, up to the first token, and lets them take turns at decode and
prefill. Medians, and ratios within a turn, go to OUT/NAME.json, OUT/NAME.md and OUT/NAME.svg.
`pip install "graphllm[bench-cpu]"` installs the others.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
import tempfile
import time
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from bench.cpu import report
from bench.cpu.checkpoint import config_of, make_checkpoint
from bench.cpu.lock import Lock
from bench.cpu.peer import Peer, Workload, find_peers
from bench.cpu.process import Process, ProcessFailedError
from bench.cpu.turns import take_round
from bench.cpu.worker import Task
from bench.real_size import SHAPES, cpu_name

_MAX_LEN, _BATCH = 1152, 8


def main() -> None:
    """Prepare, measure, report."""
    parser = argparse.ArgumentParser(
        prog="python -m bench cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--name", default="cpu_peers", help="of the result files")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=3, help="of a round")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=SHAPES, help="of the model")
    parser.add_argument("--layers", type=int, help="fewer than the shape has, to try things out")
    parser.add_argument("--only", help="only systems whose name has one of these words, separated by commas")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "graphllm-bench-cpu")
    parser.add_argument("--lock", type=Path, help="hold this file's lock while something is measured")
    args = parser.parse_args()
    config = config_of(args.shape, args.layers)
    work = args.work / f"{args.shape}-{config['num_hidden_layers']}"
    model = Workload(work / "checkpoint", work, config, args.threads, _MAX_LEN, _BATCH)
    make_checkpoint(model.checkpoint, config)
    lock = Lock(args.lock)
    wanted = args.only.lower().split(",") if args.only else [""]
    peers = [p for p in find_peers().values() if any(w in p.name.lower() for w in wanted)]
    measured = report.Measured(
        about={"machine": cpu_name(), "system": platform.platform(), "threads": args.threads, "rounds": args.rounds,
               "turns": args.turns, "shape": args.shape, "layers": config["num_hidden_layers"],
               "command": command(args), "date": time.strftime("%Y-%m-%d"), "versions": versions(peers)},
        parameters=report.count_parameters(config),
    )  # fmt: skip
    ready = []
    for peer in peers:
        print(f"{peer.name}: preparing", file=sys.stderr, flush=True)
        reason = peer.missing() or prepare(peer, model, lock)
        if reason is None:
            ready.append(peer)
            measured.bits[peer.name] = peer.bits
        else:
            print(f"{peer.name}: not available, {reason}", file=sys.stderr, flush=True)
            measured.missing[peer.name] = reason
    for number in range(args.rounds):
        for bits in report.BITS:
            group = [p for p in ready if p.bits == bits and p.name not in measured.missing]
            systems = {p.name: partial(start, p, model, f"{number}") for p in group}
            if systems:
                systems[report.MACHINE] = partial(start_probe, args.threads)
                take_round(bits, systems, number, args.turns, lock, measured)
        lock.release()
        report.write(args.out, args.name, measured)


def command(args: argparse.Namespace) -> str:
    """What to type to measure the same again."""
    parts = {"out": args.out, "rounds": args.rounds, "turns": args.turns, "threads": args.threads,
             "shape": args.shape, "layers": args.layers, "only": args.only}  # fmt: skip
    return " ".join(["python -m bench cpu", *(f"--{n} {v}" for n, v in parts.items() if v is not None)])


def prepare(peer: Peer, model: Workload, lock: Lock) -> str | None:
    """Convert the checkpoint for it; why that failed."""
    lock.step()
    try:
        with worker("prepare", peer, model, "") as process:
            process.end()
    except ProcessFailedError as failure:
        return f"preparation failed: {failure}"
    return None


def start(peer: Peer, model: Workload, seed: str) -> Process:
    """A process that loads it, with the files that it reads in the page cache."""
    for path in peer.files(model):
        warm(path)
    return worker("measure", peer, model, seed)


def worker(do: Literal["prepare", "measure"], peer: Peer, model: Workload, seed: str) -> Process:
    """The process of a Task."""
    task = Task(do, peer.name, model, time.perf_counter(), seed)
    return Process([sys.executable, "-m", "bench.cpu.worker", task.to_json()], {"OMP_NUM_THREADS": str(model.threads)})


def start_probe(threads: int) -> Process:
    """What the machine can do; shared ones differ from minute to minute."""
    return Process([sys.executable, "-m", "bench.cpu.machine", str(threads)])


def warm(path: Path) -> None:
    """Have a file, or all of a folder, in the page cache."""
    for file in (path, *path.rglob("*")):
        if file.is_file():
            with file.open("rb", buffering=0) as handle:
                while handle.read(1 << 24):
                    pass


def versions(peers: list[Peer]) -> dict[str, str]:
    """Of all packages that are installed."""
    found = {"python": platform.python_version()}
    for package in sorted({name for peer in peers for name in peer.packages}):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


if __name__ == "__main__":
    main()
