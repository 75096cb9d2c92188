"""The engine around the model: what a step costs on the host, what the prefix cache saves, and throughput.

engine_overhead: a core step with an executor that computes nothing, at 1, 64 and 256 running requests. engine_prefix:
64 requests that share 1,024 tokens, cold and warm. engine_throughput: 64 requests of 128 tokens in, 64 out, compared
with transformers' static batch and with our own executor driven directly, in turn in one run. The last two run the
Qwen2.5-0.5B shape with random bf16 weights.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.cpu.checkpoint import config_of, make_checkpoint
from bench.driving import Stepper, request
from bench.harness import CPUS, Case, in_turn
from bench.models import compile_to
from graphllm.program.schema import CacheGroup, CacheLayout
from graphllm.runtime.memory.padding import Size

CASES = [
    ("engine_overhead", {}),
    ("engine_prefix", {"threads": CPUS}),
    ("engine_throughput", {"threads": CPUS, "rounds": 3}),
]
PACKAGES = ("transformers",)
IN, OUT, REQUESTS, SHARED = 128, 64, 64, 1024


class StubExecutor:
    """An executor that gives random tokens at once."""

    def __init__(self, slots: int, blocks: int) -> None:
        import torch

        from graphllm.config import Bucket

        self.max_num_seqs = self.max_rows = slots
        self.max_num_batched_tokens, self.vocab = 8192, 32000
        self.layout = CacheLayout((CacheGroup("full", 0, 16),), blocks)
        self.buckets = [Bucket("mixed", 1, self.max_num_batched_tokens)]
        self.shareable, self.device_drafts, self.device = True, False, torch.device("cpu")
        self.task, self.inputs, self.item_input = "generate", {}, (None, 0)
        self.max_logprobs, self.max_logit_bias = 20, 1024
        self.vector, self.adapted, self.max_lora_rank, self.adapters, self.outputs = ("R", 0), (), 0, {}, ()
        self._random = np.random.default_rng(0)

    def start(self, step: Any, program: str = "plain") -> Any:
        from graphllm.runtime.step_handle import StepResult

        tokens = self._random.integers(10, self.vocab, step.rows).astype(np.int32)

        size = Size(self.buckets[0], step.tokens, step.sequences, step.rows)

        class Handle:
            def __init__(self) -> None:
                self.size = size

            def wait(self) -> StepResult:
                return StepResult({"tokens": tokens}, {}, None)

        return Handle()

    def close(self) -> None:
        pass


def overhead() -> dict[str, Any]:
    """Microseconds of a core step by the number of running requests, decode only."""
    from graphllm.config import SchedulerConfig
    from graphllm.engine.core import EngineCore

    found = {}
    rng = np.random.default_rng(0)
    for running in (1, 64, 256):
        core = EngineCore(StubExecutor(running, 256 * 80), 2048, SchedulerConfig())  # type: ignore[arg-type]
        for i in range(running):
            core.add(request(i, rng.integers(10, 32000, 200).tolist(), 900, temperature=0))
        while core.stats().generated_tokens < 20 * running:
            core.step()
        times = []
        for _ in range(600):
            start = time.perf_counter()
            news = core.step()
            times.append(1e6 * (time.perf_counter() - start))
            assert len(news) == running
        core.close()
        found[running] = {"median us": round(statistics.median(times), 1),
                          "p99 us": round(float(np.percentile(times, 99)), 1)}  # fmt: skip
    return {"core step with a stub executor, by running requests": found}


def open_core(folder: Path, artifact: Path, threads: int) -> Any:
    """The engine core of an artifact, as the server opens it."""
    import torch

    from graphllm.config import CoreConfig, LoadConfig, ModelConfig
    from graphllm.loading.core.load import load_core

    torch.set_num_threads(threads)
    return load_core(CoreConfig(ModelConfig(str(folder)), LoadConfig(str(artifact), threads=threads)))


def drain(core: Any, prompts: list[list[int]], limit: int) -> tuple[list[float], float]:
    """Seconds to each request's first token, and to the end."""
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        core.add(request(i, prompt, limit, temperature=0))
    first: dict[str, float] = {}
    while core.unfinished:
        for update in core.step():
            first.setdefault(update.id, time.perf_counter() - start)
    return list(first.values()), time.perf_counter() - start


def prefix(folder: Path, artifact: Path, threads: int) -> dict[str, Any]:
    """Time to first token of 64 requests with a common beginning, with an empty and with a filled prefix cache."""
    core = open_core(folder, artifact, threads)
    rng = np.random.default_rng(1)
    drain(core, [rng.integers(0, 1000, 64).tolist()], 2)
    shared = rng.integers(0, 150000, SHARED).tolist()
    prompts = [shared + rng.integers(0, 150000, 16).tolist() for _ in range(REQUESTS)]
    result: dict[str, Any] = {}
    others = [rng.integers(0, 150000, SHARED + 16).tolist() for _ in range(REQUESTS)]
    for name, given in (("nothing shared", others), ("cold, shared among themselves", prompts), ("warm", prompts)):
        before = core.stats().prefix_hits
        times, total = drain(core, given, 1)
        hits = core.stats().prefix_hits - before
        result[name] = {
            "mean s": round(statistics.mean(times), 3), "last s": round(total, 3), "prompt tokens found": hits,
            "of": len(given) * (SHARED + 16),
        }  # fmt: skip
    mean = {name: row["mean s"] for name, row in result.items()}
    result["time to first token, warm / nothing shared"] = round(mean["warm"] / mean["nothing shared"], 4)
    core.close()
    return {"prefix cache, 64 requests, 1,024 shared tokens": result}


def throughput(folder: Path, artifact: Path, threads: int, rounds: int) -> dict[str, Any]:
    """Output tokens per second of the engine, of our executor as one static batch, and of transformers' static
    batch."""
    import torch
    from transformers import AutoModelForCausalLM

    core = open_core(folder, artifact, threads)
    ours = Stepper(folder, artifact, threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    rng = np.random.default_rng(2)

    def engine() -> float:
        prompts = [rng.integers(0, 150000, IN).tolist() for _ in range(REQUESTS)]
        return REQUESTS * OUT / drain(core, prompts, OUT)[1]

    def static() -> float:
        start = time.perf_counter()
        rows = [rng.integers(0, 150000, IN).tolist() for _ in range(REQUESTS)]
        tokens: list[int] = []
        for at in range(0, REQUESTS, 8):
            tokens += ours.step(rows[at : at + 8], [0] * 8)  # these write pages of other rows: only time counts here
        for i in range(OUT - 1):
            tokens = ours.step([[t] for t in tokens], [IN + i] * REQUESTS)
        return REQUESTS * OUT / (time.perf_counter() - start)

    def transformers() -> float:
        ids = torch.from_numpy(rng.integers(0, 150000, (REQUESTS, IN)))
        start = time.perf_counter()
        with torch.inference_mode():
            out = model(ids, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1:].argmax(-1)
            for _ in range(OUT - 1):
                out = model(token, past_key_values=out.past_key_values, use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
        return REQUESTS * OUT / (time.perf_counter() - start)

    systems = {"engine": engine, "executor, static batch": static, "transformers, static batch": transformers}

    def measure(name: str) -> float:
        value = systems[name]()
        print(f"{name} {value:.1f}", file=sys.stderr, flush=True)
        return value

    found = in_turn(rounds, systems, measure)
    row = {name: round(statistics.median(v), 1) for name, v in found.items()}
    core.close()
    return {
        f"output tokens/s, {REQUESTS} requests, {IN} in, {OUT} out": row,
        "rounds": {name: [round(x, 1) for x in v] for name, v in found.items()},
        "ratios": {
            "engine / executor": round(row["engine"] / row["executor, static batch"], 2),
            "engine / transformers": round(row["engine"] / row["transformers, static batch"], 2),
        },
    }


def run(case: Case) -> dict[str, Any]:
    """The part that the case names."""
    if case.case == "engine_overhead":
        return overhead()
    folder = Path(tempfile.gettempdir()) / "graphllm-bench" / "qwen2.5-0.5b-24"
    make_checkpoint(folder, config_of("qwen2.5-0.5b"))
    compile_to(folder / "artifact", folder, "--max-model-len", "2048")
    if case.case == "engine_prefix":
        return prefix(folder, folder / "artifact", case.threads)
    return throughput(folder, folder / "artifact", case.threads, case.rounds)
