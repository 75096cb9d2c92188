"""The engine around the model: what a step costs on the host, what the prefix cache saves, and throughput.

    python bench/engine.py overhead|prefix|throughput [--threads N] [--out FILE.json]

overhead: a core step with an executor that computes nothing, at 1, 64 and 256 running requests. prefix: 64 requests
that share 1,024 tokens, cold and warm. throughput: 64 requests of 128 tokens in, 64 out, beside transformers' static
batch and our own executor driven directly, in turn in one run. The last two run the Qwen2.5-0.5B shape with random bf16
weights.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
from real_size import SHAPES, Ours, cpu_name, make_checkpoint

from graphllm.program.schema import CacheGroup, CacheLayout
from graphllm.runtime.memory.padding import Size

IN, OUT, REQUESTS, SHARED = 128, 64, 64, 1024


class StubExecutor:
    """An executor whose tokens are random numbers, at once."""

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

    def start(self, step, program: str = "plain"):
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


def request(number: int, prompt: list[int], limit: int):
    """A greedy request that only its length ends."""
    from graphllm.config.requests.sampling_params import SamplingParams
    from graphllm.engine.requests.request import EngineRequest

    params = SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True)
    return EngineRequest(id=str(number), prompt=prompt, params=params, stop_ids=[], limit=limit, seed=number)


def overhead() -> dict:
    """Microseconds of a core step by the number of running requests, decode only."""
    from graphllm.config import SchedulerConfig
    from graphllm.engine.core import EngineCore

    found = {}
    rng = np.random.default_rng(0)
    for running in (1, 64, 256):
        core = EngineCore(StubExecutor(running, 256 * 80), 2048, SchedulerConfig())  # type: ignore[arg-type]
        for i in range(running):
            core.add(request(i, rng.integers(10, 32000, 200).tolist(), 900))
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


def open_core(folder: Path, artifact: Path, threads: int):
    """The engine core of an artifact, as the server opens it."""
    import torch

    from graphllm.config import CoreConfig, LoadConfig, ModelConfig
    from graphllm.loading.core.load import load_core

    torch.set_num_threads(threads)
    return load_core(CoreConfig(ModelConfig(str(folder)), LoadConfig(str(artifact), threads=threads)))


def drain(core, prompts: list[list[int]], limit: int) -> tuple[list[float], float]:
    """Seconds to each request's first token, and to the end."""
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        core.add(request(i, prompt, limit))
    first: dict[str, float] = {}
    while core.unfinished:
        for update in core.step():
            first.setdefault(update.id, time.perf_counter() - start)
    return list(first.values()), time.perf_counter() - start


def prefix(folder: Path, artifact: Path, threads: int) -> dict:
    """Time to first token of 64 requests with a common beginning, with an empty and with a filled prefix cache."""
    core = open_core(folder, artifact, threads)
    rng = np.random.default_rng(1)
    drain(core, [rng.integers(0, 1000, 64).tolist()], 2)
    shared = rng.integers(0, 150000, SHARED).tolist()
    prompts = [shared + rng.integers(0, 150000, 16).tolist() for _ in range(REQUESTS)]
    result: dict = {}
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


def throughput(folder: Path, artifact: Path, threads: int, rounds: int) -> dict:
    """Output tokens per second of the engine, of our executor as one static batch, and of transformers' static
    batch."""
    import torch
    from transformers import AutoModelForCausalLM

    core = open_core(folder, artifact, threads)
    ours = Ours(folder, artifact, threads)
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

    found: dict[str, list[float]] = {"engine": [], "executor, static batch": [], "transformers, static batch": []}
    for _ in range(rounds):
        for measure, values in zip((engine, static, transformers), found.values(), strict=True):
            values.append(measure())
            print({n: [round(x, 1) for x in v] for n, v in found.items()}, file=sys.stderr, flush=True)
    row = {name: round(statistics.median(v), 1) for name, v in found.items()}
    core.close()
    return {
        f"output tokens/s, {REQUESTS} requests, {IN} in, {OUT} out": row,
        "rounds": {name: [round(x, 1) for x in v] for name, v in found.items()},
        "engine / executor": round(row["engine"] / row["executor, static batch"], 2),
        "engine / transformers": round(row["engine"] / row["transformers, static batch"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("overhead", "prefix", "throughput"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "graphllm-bench")
    args = parser.parse_args()
    result: dict = {"machine": cpu_name(), "threads": args.threads, "python": platform.python_version(),
                    "versions": {p: version(p) for p in ("torch", "transformers")},
                    "command": " ".join(sys.argv)}  # fmt: skip
    if args.what == "overhead":
        result |= overhead()
    else:
        folder = args.keep / "qwen2.5-0.5b-24"
        artifact = folder / "artifact"
        make_checkpoint(folder, SHAPES["qwen2.5-0.5b"])
        subprocess.run(
            [
                sys.executable,
                "-m",
                "graphllm.cli",
                "compile",
                str(folder),
                "--max-model-len",
                "2048",
                "-o",
                str(artifact),
            ],
            check=True,
        )
        if args.what == "prefix":
            result |= prefix(folder, artifact, args.threads)
        else:
            result |= throughput(folder, artifact, args.threads, args.rounds)
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
