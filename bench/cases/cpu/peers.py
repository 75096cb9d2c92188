"""graphllm and every other system that is installed, on one model, on a CPU, in turn.

Writes a checkpoint of random weights in the shape of Qwen2.5-0.5B, or another of bench/models.py, and converts it for
each system. In a round, the systems of the same bits are started and ended one after the other, in random order, in
fresh processes, with their files in the page cache, up to the first token of a prompt of 16: that is their start. Then
all are loaded and take turns at decode and prefill. For each case every system runs it once while the others wait, with
the same prompts, in an order that is drawn each time, the first time after a short run to warm up. Before and after
each, memory is read plainly, 12 times 1.2 GB. A shared machine's memory changes its speed within seconds, so compare
the figures of one turn, as the rows "over" do. Systems of different bits share no turns.

The rows "floor" read the weights once a step, of experts as many as are chosen at random, without the scales of
quantized ones. A prompt's products run at the speed of a loop of them from the first-level cache, without attention and
the first and last layer. A start only imports torch. Decode counts from when every prompt has its first token.
OpenVINO's and llama.cpp's files are made from the same numbers; each system has its own defaults otherwise.
`pip install "graphllm[bench-cpu]"` installs the others.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

from bench.cpu import report
from bench.cpu.checkpoint import config_of, make_checkpoint
from bench.cpu.lock import Lock
from bench.cpu.peer import Peer, Workload, find_peers
from bench.cpu.turns import take_round
from bench.cpu.worker import Task
from bench.harness import CPUS, Case, Rows
from bench.process import Process, ProcessFailedError

CASES = [
    ("cpu", {"rounds": 5, "turns": 3, "threads": CPUS, "shape": "qwen2.5-0.5b", "layers": 0, "only": "", "work": None,
             "lock": None}),
    ("cpu_gguf", {"rounds": 3, "turns": 2, "threads": CPUS, "shape": "qwen2.5-0.5b", "layers": 0,
                  "only": "q8_0,q4_0,q4_k", "work": None, "lock": None}),
    ("cpu_moe", {"rounds": 1, "turns": 3, "threads": CPUS, "shape": "qwen3-moe-1.2b", "layers": 0,
                 "only": "graphllm,transformers,llama", "work": None, "lock": None}),
    ("cpu_hybrid", {"rounds": 2, "turns": 2, "threads": CPUS, "shape": "granite-hybrid-350m", "layers": 0,
                    "only": "bf16", "work": None, "lock": None}),
    ("cpu_latent", {"rounds": 1, "turns": 3, "threads": CPUS, "shape": "deepseek-0.5b", "layers": 0, "only": "bf16",
                    "work": None, "lock": None}),
    ("cpu_moe_quantized", {"rounds": 1, "turns": 3, "threads": CPUS, "shape": "qwen3-moe-1.2b", "layers": 0,
                           "only": "int8,int4,q8_0,q4_0", "work": None, "lock": None}),
]  # fmt: skip
HELP = {
    "turns": "turns of a round",
    "shape": "shape of the model",
    "layers": "fewer layers than the shape has, to try things out",
    "only": "only systems with one of these words in their name, separated by commas",
    "work": "folder of the converted models",
    "lock": "hold this file's lock while something is measured",
}
PACKAGES = tuple(dict.fromkeys(package for peer in find_peers().values() for package in peer.packages))
_MAX_LEN, _BATCH = 1152, 8


def run(case: Case) -> Iterator[Rows]:
    """Prepare and measure; the rows after every round."""
    config = config_of(case.shape, case.layers or None)
    place = case.work or Path(tempfile.gettempdir()) / "graphllm-bench-cpu"
    work = place / f"{case.shape}-{config['num_hidden_layers']}"
    model = Workload(work / "checkpoint", work, config, case.threads, _MAX_LEN, _BATCH)
    make_checkpoint(model.checkpoint, config)
    lock = Lock(case.lock)
    wanted = case.only.lower().split(",") if case.only else [""]
    peers = [p for p in find_peers().values() if any(w in p.name.lower() for w in wanted)]
    measured = report.Measured(report.count_parameters(config))
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
    for number in range(case.rounds):
        for bits in report.BITS:
            group = [p for p in ready if p.bits == bits and p.name not in measured.missing]
            systems = {p.name: partial(start, p, model, f"{number}") for p in group}
            if systems:
                systems[report.MACHINE] = partial(start_probe, case.threads)
                take_round(bits, systems, number, case.turns, lock, measured)
        lock.release()
        yield report.rows(measured)


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
