"""What deterministic mode costs: steps of two artifacts of one shape, with and without it, in turn.

    python bench/deterministic.py [--shape qwen2.5-0.5b] [--target cpu] [--threads N] [--rounds 15] [--context 256]
        [--decode 1,8,64] [--prefill 1024] [--mixed 64] [--out FILE.json]

Random weights. A mixed step is that many decoding sequences beside a prompt of 512 tokens. Milliseconds, medians and
the best in brackets, as Markdown. On a GPU: --target cuda --shape llama3.1-8b --decode 1,32,64,128,256 --prefill 8192.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as the command line sets it, before the OpenMP runtime loads

import numpy as np
from compile_time import shape
from gpu_step import batch

from graphllm.compile.pipeline import compile_model
from graphllm.config import EngineArgs
from graphllm.loading.artifact.resolve import compile_config
from graphllm.loading.checkpoint.source import open_source
from graphllm.program.artifact import Artifact
from graphllm.runtime.executor import Executor
from graphllm.runtime.memory.staging import ragged
from graphllm.weights.loading.random import random_weights
from graphllm.weights.plan.plan import WeightPlan

MOST = 16384  # tokens of the longest context
PROMPT = 512  # tokens beside decoding sequences


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


def steps(args: argparse.Namespace, executor: Executor) -> Iterator[tuple[str, Any]]:
    """The kinds of steps that are measured."""
    for size in args.decode:
        yield f"decode {size}", batch(size, 1, args.context, executor)
    for size in args.prefill:
        yield f"prefill {size}", batch(1, size, 0, executor)
    for size in args.mixed:
        yield f"decode {size} beside {PROMPT}", mixed(size, args.context, executor)


def timed(executor: Executor, step: Any) -> float:
    """Milliseconds."""
    start = time.perf_counter()
    executor.run(step)
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--target", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--context", type=int, default=256)
    for name, usual in (("decode", "1,8,64"), ("prefill", "1024"), ("mixed", "16")):
        parser.add_argument(f"--{name}", type=lambda t: [int(n) for n in t.split(",") if n], default=usual)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp())
    model = shape(root / "model", args.shape)
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
        executors.append(Executor(artifact, weights, blocks, threads=args.threads))
    found: dict[str, Any] = {"shape": args.shape, "context": args.context, "compile s": seconds, "ms": {}}
    print(f"compiled in {seconds[0]} s, deterministic in {seconds[1]} s\n")
    print("| step | ms | deterministic | ratio |\n|---|---|---|---|")
    for pair in zip(*(steps(args, executor) for executor in executors), strict=True):
        times: list[list[float]] = [[], []]
        for number in range(args.rounds + 2):
            for own, executor, (_, step) in zip(times, executors, pair, strict=True):
                own.append(timed(executor, step))
                if number < 2:
                    own.clear()
        (plain, best), (slow, least) = [(statistics.median(t), min(t)) for t in times]
        found["ms"][pair[0][0]] = [round(n, 3) for n in (plain, best, slow, least)]
        print(
            f"| {pair[0][0]} | {plain:.2f} ({best:.2f}) | {slow:.2f} ({least:.2f}) | {slow / plain:.3f} |", flush=True
        )
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))
    for executor in executors:
        executor.close()


if __name__ == "__main__":
    main()
