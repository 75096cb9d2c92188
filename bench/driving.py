"""Driving an engine core or an executor directly, as cases do."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

COMPILERS = ("torch._inductor", "torch._dynamo", "triton")  # modules that serving must not load
PREFILL, DECODE = 1024, 24  # tokens of a prompt, and steps, of `Stepper.measure`


def load(artifact: Path, folder: Path, **options: Any) -> Any:
    """An engine core with random weights."""
    from graphllm.config import EngineArgs
    from graphllm.loading.artifact.model import resolve_model
    from graphllm.loading.core.load import load_core

    args = EngineArgs(folder, load_format="dummy", artifact=artifact, skip_tokenizer_init=True, **options)
    return load_core(resolve_model(args).config)


def request(number: int, prompt: list[int], limit: int, **sampling: Any) -> Any:
    """A request that only its length ends. sampling: of SamplingParams."""
    from graphllm.config.requests.sampling_params import SamplingParams
    from graphllm.engine.requests.request import EngineRequest

    params = SamplingParams(max_tokens=limit, ignore_eos=True, **sampling)
    return EngineRequest(id=str(number), prompt=prompt, params=params, stop_ids=[], limit=limit, seed=number)


def add(core: Any, prompts: list[list[int]], limits: list[int], sampling: dict[str, Any], first: int = 0) -> None:
    """Queue requests that end at their limits, numbered from ``first``: ids of requests that run must differ."""
    for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True), first):
        core.add(request(i, prompt, limit, seed=i, **sampling))


def run(core: Any, prompts: list[list[int]], limits: list[int], sampling: dict[str, Any]) -> dict[str, float]:
    """Finish the requests; seconds and counts."""
    add(core, prompts, limits, sampling)
    begin, first, steps = time.perf_counter(), 0.0, []
    before = core.stats().steps
    while core.unfinished:
        start = time.perf_counter()
        news = core.step()
        steps.append(time.perf_counter() - start)
        if news and not first:
            first = time.perf_counter() - begin
    seconds = time.perf_counter() - begin
    return {"s": seconds, "first s": first, "steps": core.stats().steps - before,
            "median step ms": 1e3 * float(np.median(steps)), "tokens/s": sum(limits) / seconds}  # fmt: skip


def outputs(core: Any, prompts: list[list[int]], limit: int, sampling: dict[str, Any]) -> list[list[int]]:
    """What the core answers to the prompts. No clock runs."""
    add(core, prompts, [limit] * len(prompts), sampling)
    found: dict[str, list[int]] = {}
    while core.unfinished:
        for output in core.step():
            found.setdefault(output.id, []).extend(output.tokens)
    return list(found.values())


def batch(size: int, tokens: int, start: int, executor: Any) -> Any:
    """``size`` sequences with ``tokens`` new tokens each after ``start`` cached ones."""
    from graphllm.runtime.memory.staging import ragged

    blocks = -(-(start + tokens) // executor.layout.groups[0].block_size)
    rng = np.random.default_rng(0)
    table = rng.permutation(size * blocks).astype(np.int32).reshape(size, blocks)
    return ragged(rng.integers(0, 1000, (size, tokens)), [start] * size, [table])


class Stepper:
    """graphllm's executor driven directly: token ids in, token ids out."""

    def __init__(self, folder: Path, artifact: Path, threads: int) -> None:
        from graphllm.program.artifact import Artifact

        opened = Artifact.open(artifact)
        opened.check_machine()
        import torch

        torch.set_num_threads(threads)
        from graphllm.runtime.executor import Executor
        from graphllm.weights.checkpoint.checkpoint import Checkpoint
        from graphllm.weights.loading.loader import load_weights
        from graphllm.weights.plan.plan import WeightPlan

        plan = WeightPlan.from_json(opened.weights)
        weights = load_weights(plan, Checkpoint.open(folder), "cpu")
        self.executor = Executor(opened, weights, 8 * 96)

    def step(self, rows: list[list[int]], starts: list[int]) -> list[int]:
        from graphllm.runtime.memory.staging import ragged

        S = len(rows)
        width = min(self.executor.layout.num_blocks // S, 128)
        step = ragged(rows, starts, [np.arange(S * width, dtype=np.int32).reshape(S, width)])
        return self.executor.run(step).tokens.tolist()

    def measure(self, what: str, batch: int) -> float:
        if what == "prefill":
            start = time.perf_counter()
            self.step([list(range(PREFILL))], [0])
            return PREFILL / (time.perf_counter() - start)
        tokens = [self.step([list(range(128))], [0])[0]] * batch
        start = time.perf_counter()
        for i in range(DECODE):
            tokens = self.step([[t] for t in tokens], [128 + i] * batch)
        return batch * DECODE / (time.perf_counter() - start)


def traced_events(call: Callable[[], Any]) -> list[dict[str, Any]]:
    """The profiler's events of a call on the GPU: kernels, copies and the host's waits."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(file.name)
        events: list[dict[str, Any]] = json.loads(Path(file.name).read_text())["traceEvents"]
    return events


def is_work(event: dict[str, Any]) -> bool:
    """Whether the GPU works in it."""
    return event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")


def profiled(core: Any, steps: int) -> dict[str, Any]:
    """Figures of some steps, with the time that the profiler adds: the share of time in which no kernel runs, ms of the
    host without its waiting, and the kernels of a step, each with its launches and ms."""
    wall = 0.0

    def run_steps() -> None:
        nonlocal wall
        begin = time.perf_counter()
        for _ in range(steps):
            core.step()
        wall = time.perf_counter() - begin

    events = traced_events(run_steps)
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if is_work(e))
    whole = max(end for _, end in spans) - spans[0][0]
    waits = sum(e["dur"] for e in events if e.get("name") == "cudaEventSynchronize")
    kernels: dict[str, list[float]] = {}
    for e in events:
        if e.get("cat") == "kernel":
            grid = "x".join(map(str, e["args"]["grid"]))
            kernels.setdefault(f"{e['name'][:60]} {grid}", []).append(e["dur"] / 1e3)
    return {
        "GPU idle share": round(1 - busy_time(spans) / whole, 3),
        "host ms a step": round(1e3 * wall / steps - waits / 1e3 / steps, 3),
        "kernels of a step": {
            name: {"launches": round(len(ms) / steps, 2), "ms": round(sum(ms) / steps, 4)}
            for name, ms in sorted(kernels.items(), key=lambda item: -sum(item[1]))
        },
    }


def busy_time(spans: Sequence[tuple[float, float]]) -> float:
    """How long at least one of them runs, of spans (start, end) in the order of their starts."""
    busy, until = 0.0, -math.inf
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy
