"""Where the time of a step goes on a CPU: the whole step, then every call in it, added up by kernel.

    python -m bench cpu_step ARTIFACT [--steps 15] [--context 128] [--kinds decode-1,decode-8,prefill-1024]

ARTIFACT is a compiled folder (`graphllm compile DIR --load-format dummy -o ARTIFACT`); weights are random. The step as
it runs, a step with each call timed, and a plain read of 256 MB take turns; the sum of the calls is less
than the step by what the host does outside of kernels. Medians, and the best.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.driving import batch
from bench.harness import CPUS, Case
from bench.probe import huge, probe
from graphllm.program.artifact import Artifact
from graphllm.runtime.commands.adapters import WriteAdapter
from graphllm.runtime.commands.command import TensorData
from graphllm.runtime.executor import Executor
from graphllm.runtime.kernels import CpuLaunch
from graphllm.runtime.stream import alone
from graphllm.weights.loading.random import random_weights
from graphllm.weights.plan.plan import WeightPlan

CASES = [
    ("cpu_step", {"artifact": Path, "threads": CPUS, "steps": 15, "context": 128,
                  "kinds": ("decode-1", "decode-8", "prefill-1024"), "adapters": 0}),
]  # fmt: skip
HELP = {
    "artifact": "compiled folder",
    "steps": "decode steps that are measured; a quarter of it for prompts",
    "context": "cached tokens of a decoding sequence",
    "kinds": "kinds of steps",
    "adapters": "LoRA adapters that the tokens have in turn; the artifact needs --enable-lora",
}
POOL, READ = 1 << 30, 256 << 20


def label(launch: Callable[[], Any], weights: dict[int, tuple[int, ...]]) -> str:
    """The kernel's name; for products also the shape of the weight."""
    if isinstance(launch, CpuLaunch):
        (kernel,) = launch.kernels
        name, addresses = kernel.name, [cell.ptr for cell in kernel.arguments]
    else:
        function, given = (launch.func, launch.args) if isinstance(launch, functools.partial) else (launch, ())
        name = getattr(function, "__name__", str(function))
        addresses = [a.data_ptr() for a in given if isinstance(a, torch.Tensor)]
    shapes = (weights.get(at, ()) for at in addresses)
    return " ".join([name, *("x".join(map(str, shape)) for shape in shapes if len(shape) == 2)][:2])


class Timer:
    """One kind of step of an executor, measured again and again."""

    def __init__(
        self, executor: Executor, weights: dict[str, torch.Tensor], kind: str, context: int, adapters: int
    ) -> None:
        name, count = kind.split("-")
        step = batch(int(count), 1, context, executor) if name == "decode" else batch(1, int(count), 0, executor)
        if adapters:
            ids = np.arange(step.tokens, dtype=np.int32) % adapters + 1
            step = step._replace(arrays={**step.arrays, "adapter_ids": ids})
        self.executor, self.input = executor, step
        for _ in range(3):
            executor.run(self.input)
        graph = executor._main
        bound = graph.bound(graph.variant("plain", self.input), graph.pick(self.input))
        self.launches = [launch for _, launches in bound.parts[""] for launch in launches]
        shapes = {w.data_ptr(): tuple(w.shape) for w in weights.values()}
        self.labels = [label(x, shapes) for x in self.launches]
        self.steps: list[float] = []
        self.inner: list[float] = []
        self.calls: dict[str, list[float]] = defaultdict(list)

    def measure(self) -> None:
        start = time.perf_counter()
        self.executor.run(self.input)
        self.steps.append(time.perf_counter() - start)
        self.executor.stream.submit(self._timed).result()

    def _timed(self) -> None:
        sums: dict[str, float] = defaultdict(float)
        first = last = time.perf_counter()
        for x, what in zip(self.launches, self.labels, strict=True):
            x()
            now = time.perf_counter()
            sums[what] += now - last
            last = now
        self.inner.append(last - first)
        for what, seconds in sums.items():
            self.calls[what].append(seconds)

    def rows(self) -> dict[str, Any]:
        """The step, then its calls by kernel, the longest first."""
        rest = statistics.median(a - b for a, b in zip(self.steps, self.inner, strict=True))
        step = {"ms": 1e3 * statistics.median(self.steps), "best ms": 1e3 * min(self.steps),
                "calls": len(self.launches), "calls ms": 1e3 * statistics.median(self.inner),
                "rest ms": 1e3 * rest}  # fmt: skip
        calls = {
            name: {"times": self.labels.count(name), "us a step": 1e6 * statistics.median(v), "best us": 1e6 * min(v)}
            for name, v in sorted(self.calls.items(), key=lambda item: -statistics.median(item[1]))
        }
        return {**step, **calls}


def run(case: Case) -> dict[str, Any]:
    """Memory, then every kind of step."""
    library = probe()
    with alone():
        pool = huge(POOL)
        artifact = Artifact.open(case.artifact)
        weights = random_weights(WeightPlan.from_json(artifact.weights), "cpu")
        executor = Executor(artifact, weights, 8192, threads=case.threads)
        for entry in range(1, case.adapters + 1):
            tables = {name: torch.randn(shape) / 64 for name, shape in executor.adapters.items()}
            executor.do(WriteAdapter(entry, {name: TensorData(table) for name, table in tables.items()}))
        timers = {kind: Timer(executor, weights, kind, case.context, case.adapters) for kind in case.kinds}
        reads: list[float] = []

        def read() -> None:
            start = time.perf_counter()
            library.probe_read(pool.data_ptr() + len(reads) * READ % POOL, READ)
            reads.append(READ / (time.perf_counter() - start) / 1e9)

        for kind, timer in timers.items():
            for _ in range(case.steps if kind.startswith("decode") else -(-case.steps // 4)):
                executor.stream.submit(read).result()
                timer.measure()
        held = sum({w.data_ptr(): w.nbytes for w in weights.values()}.values())
        middle, best = statistics.median(reads), max(reads)
        executor.close()
    memory = {"read GB/s": middle, "best GB/s": best, "weights GB": held / 1e9, "weights ms": held / middle / 1e6}
    return {"memory": memory, **{kind: timer.rows() for kind, timer in timers.items()}}
