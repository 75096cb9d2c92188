"""What deterministic mode costs: steps of two artifacts of one shape, with and without it, in turn.

    python -m bench deterministic [--rounds 15] [--context 256] [--decode 1,8,64] [--prefill 1024] [--mixed 16]
    python -m bench deterministic_gpu

Random weights. A mixed step is that many decoding sequences and a prompt of 512 tokens. Milliseconds, medians and the
best.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.driving import batch
from bench.harness import Case, in_turn
from bench.models import write_config
from graphllm.compile.pipeline import compile_model
from graphllm.config import EngineArgs
from graphllm.loading.artifact.resolve import compile_config
from graphllm.loading.checkpoint.source import open_source
from graphllm.program.artifact import Artifact
from graphllm.runtime.executor import Executor
from graphllm.runtime.memory.staging import ragged
from graphllm.weights.loading.random import random_weights
from graphllm.weights.plan.plan import WeightPlan

CASES = [
    ("deterministic", {"shape": "qwen2.5-0.5b", "target": "cpu", "threads": 0, "rounds": 15, "context": 256,
                       "decode": (1, 8, 64), "prefill": (1024,), "mixed": (16,)}),
    ("deterministic_gpu", {"shape": "llama3.1-8b", "target": "cuda", "threads": 0, "rounds": 15, "context": 256,
                           "decode": (1, 16, 32, 64, 128, 256), "prefill": (512, 2048, 8192), "mixed": (64,)}),
]  # fmt: skip
HELP = {
    "threads": "threads of a CPU's kernels; 0: as many as CPUs",
    "context": "cached tokens of a decoding sequence",
    "decode": "batches of decode steps",
    "prefill": "lengths of prompts",
    "mixed": "sequences that decode in steps with a prompt",
}
MOST = 16384  # tokens of the longest context
NAMES = ("plain", "deterministic")
PROMPT = 512  # tokens of a prompt in a mixed step


def compiled(model: Path, folder: Path, target: str, deterministic: bool) -> tuple[Path, float]:
    """An artifact, and the seconds that it took."""
    source = open_source(model, load_format="dummy")
    wanted = EngineArgs(target=target, max_model_len=MOST, deterministic=deterministic, dtype="bfloat16")
    start = time.perf_counter()
    place = compile_model(source.config, source.tensors, compile_config(source.config, wanted), folder)
    return place, time.perf_counter() - start


def mixed(decoding: int, context: int, executor: Executor) -> Any:
    """Sequences that decode, and a prompt."""
    size = executor.layout.groups[0].block_size
    blocks = [-(-(context + 1) // size)] * decoding + [-(-PROMPT // size)]
    order = np.random.default_rng(0).permutation(sum(blocks)).astype(np.int32)
    table = np.zeros((decoding + 1, max(blocks)), np.int32)
    for row, part in zip(table, np.split(order, np.cumsum(blocks)[:-1]), strict=True):
        row[: len(part)] = part
    tokens = [np.arange(1, dtype=np.int64)] * decoding + [np.arange(PROMPT, dtype=np.int64)]
    return ragged(tokens, [context] * decoding + [0], [table])


def steps(args: Case, executor: Executor) -> Iterator[tuple[str, Any]]:
    """The kinds of steps that are measured."""
    for size in args.decode:
        yield f"decode {size}", batch(size, 1, args.context, executor)
    for size in args.prefill:
        yield f"prefill {size}", batch(1, size, 0, executor)
    for size in args.mixed:
        yield f"decode {size} and a prompt of {PROMPT}", mixed(size, args.context, executor)


def timed(executor: Executor, step: Any) -> float:
    """Milliseconds."""
    start = time.perf_counter()
    executor.run(step)
    return 1e3 * (time.perf_counter() - start)


def run(args: Case) -> Iterator[dict[str, Any]]:
    """Seconds of compiling, then a row for each kind of step."""
    root = Path(tempfile.mkdtemp())
    model = write_config(root / "model", args.shape)
    weights: dict[str, Any] | None = None
    places, executors, seconds = [], [], []
    for deterministic in (False, True):  # both before any is opened: compilers take memory of a GPU, too
        place, taken = compiled(model, root / f"artifact-{deterministic}", args.target, deterministic)
        places.append(place)
        seconds.append(round(taken, 1))
    for place in places:
        artifact = Artifact.open(place)
        if weights is None:
            weights = random_weights(WeightPlan.from_json(artifact.weights), args.target)
        blocks = (max(args.decode) + 1) * (args.context + PROMPT) // 16 + max(args.prefill) // 16
        executors.append(Executor(artifact, weights, blocks, threads=args.threads or None))
    yield {"compile s": {"plain": seconds[0], "deterministic": seconds[1]}}
    for pair in zip(*(steps(args, executor) for executor in executors), strict=True):
        opened = {name: (executor, step) for name, executor, (_, step) in zip(NAMES, executors, pair, strict=True)}
        times = in_turn(args.rounds, NAMES, lambda name, opened=opened: timed(*opened[name]), warm=2)  # type: ignore[misc]
        medians = {f"{name} ms": round(statistics.median(t), 3) for name, t in times.items()}
        best = {f"{name}, best ms": round(min(t), 3) for name, t in times.items()}
        ratio = statistics.median(times["deterministic"]) / statistics.median(times["plain"])
        yield {pair[0][0]: {**medians, "ratio": round(ratio, 3), **best}}
    for executor in executors:
        executor.close()
