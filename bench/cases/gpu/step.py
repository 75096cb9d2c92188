"""Step times of real model shapes on one GPU, from a compiled artifact in a fresh process, with the start-up breakdown.

Random bf16 weights. A step is what serving does: stage the batch, copy it, replay, fetch the tokens. Each shape is
compiled by `graphllm compile` and measured in a process of its own that loads the artifact. gpu_step_from_disk: weights
from a safetensors file in the page cache.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.driving import COMPILERS, batch
from bench.harness import Case, in_process
from bench.models import compile_to, new_folder, write_checkpoint
from bench.vllm_figures import beat

CASES = [
    ("gpu_step", {"shapes": ("llama3.1-8b", "qwen3-0.6b"), "weights_on_disk": False, "compile": ""}),
    ("gpu_step_from_disk", {"shapes": ("llama3.1-8b",), "weights_on_disk": True, "compile": ""}),
]
HELP = {
    "shapes": "shapes of models",
    "weights_on_disk": "write a checkpoint first, and load it",
    "compile": "more options for graphllm compile",
}
CONTEXT, STEPS = 256, 100


def worker(folder: str, artifact: str) -> dict[str, Any]:
    """Load the artifact and measure, in a process of its own."""
    clock = [("process", time.perf_counter())]

    def mark(name: str) -> None:
        clock.append((name, time.perf_counter()))

    from graphllm.program.artifact import Artifact

    opened = Artifact.open(Path(artifact))
    opened.check_machine()
    mark("verify artifact")
    import torch

    mark("import torch")
    torch.zeros(1, device="cuda")
    mark("CUDA context")
    from graphllm.runtime.executor import Executor
    from graphllm.weights.checkpoint.checkpoint import Checkpoint
    from graphllm.weights.loading.loader import load_weights
    from graphllm.weights.loading.random import random_weights
    from graphllm.weights.plan.plan import WeightPlan

    plan = WeightPlan.from_json(opened.weights)
    real = Path(folder, "model.safetensors.index.json").exists()
    weights = load_weights(plan, Checkpoint.open(Path(folder)), "cuda") if real else random_weights(plan, "cuda")
    torch.cuda.synchronize()
    mark("weights from page cache" if real else "random weights")
    pages = 256 * (CONTEXT + 256) // 16
    executor = Executor(opened, weights, pages)
    mark("executor")
    executor.run(batch(1, 128, 0, executor))
    mark("prefill of 128, first token")
    executor.run(batch(1, 1, 128, executor))
    mark("first decode step, with capture")
    phases = {name: round(now - before, 3) for (_, before), (name, now) in itertools.pairwise(clock)}
    result: dict[str, Any] = {"start-up s": phases}
    result["forbidden modules"] = [m for m in COMPILERS if m in sys.modules]
    for size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        step = batch(size, 1, CONTEXT, executor)
        for _ in range(5):
            executor.run(step)
        times = []
        for _ in range(STEPS):
            start = time.perf_counter()
            executor.run(step)
            times.append(1e3 * (time.perf_counter() - start))
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        runner = executor._main.bound("plain", executor._main.pick(step))

        def replay(runner=runner, begin=begin, end=end) -> None:
            begin.record()
            for _ in range(STEPS):
                runner.run("")
            end.record()

        executor.stream.submit(replay)
        torch.cuda.synchronize()
        result[f"decode {size}"] = {
            "ms": round(statistics.median(times), 3),
            "graph ms": round(begin.elapsed_time(end) / STEPS, 3),
        }
    for size in (512, 2048, 8192):
        if size <= executor.max_num_batched_tokens and size // 16 <= pages:
            step = batch(1, size, 0, executor)
            times = []
            for _ in range(4):
                start = time.perf_counter()
                executor.run(step)
                times.append(1e3 * (time.perf_counter() - start))
            result[f"prefill {size}"] = {"ms": round(statistics.median(times[1:]), 2)}
    return result


def run(case: Case) -> Iterator[dict[str, Any]]:
    """Shape by shape."""
    for shape in case.shapes:
        folder = new_folder(shape)
        if case.weights_on_disk:
            write_checkpoint(folder)
        dummy = () if case.weights_on_disk else ("--load-format", "dummy")
        start = time.perf_counter()
        compile_to(folder / "artifact", folder, "--max-model-len", "16384", *case.compile.split(), *dummy)
        compiled = time.perf_counter() - start
        found = in_process(worker, folder, folder / "artifact") | {"compile s": round(compiled, 1)}
        for row, figures in found.items():
            if row.startswith("decode"):
                figures |= beat(shape, row, figures["ms"])
        yield {shape: found}
