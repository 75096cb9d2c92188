"""The engine core on one GPU: steps as requests see them, what each sampling feature costs, and throughput.

Real shapes, random bf16 weights. decode: 128 tokens in, 256 out, greedy, all requests at once. features: 256 requests,
the same with each kind of sampling. mixed: 1,000 requests, 100 to 1,024 tokens in and out, all queued at the beginning.
prefix: 64 requests that share 1,024 tokens, time to their first tokens.
Rows that vLLM 0.26 was measured in, on the same kind of GPU, have its figures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.driving import load, outputs
from bench.driving import run as drive
from bench.harness import Case, check_tokens, in_process, void_unless
from bench.models import SHAPES, compile_to, new_folder
from bench.vllm_figures import beat

CASES = [("gpu_engine", {"shapes": ("llama3.1-8b", "qwen3-0.6b")})]
HELP = {"shapes": "shapes of models"}
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain sampling": {"temperature": 1.0},
    "top-k 20, top-p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "logit bias": {"temperature": 0.0, "logit_bias": dict.fromkeys(range(100), 1.0)},
    "allowed token ids": {"temperature": 0.0, "allowed_token_ids": tuple(range(1000, 2000))},
    "logprobs 5": {"temperature": 0.0, "logprobs": 5},
}


def measure(shape: str, folder: str) -> dict[str, Any]:
    """One shape, all rows, from the artifact in its folder."""
    core = load(Path(folder, "artifact"), Path(folder))
    rng = np.random.default_rng(0)
    vocab = SHAPES[shape]["vocab_size"]

    def prompts(lengths: list[int]) -> list[list[int]]:
        return [rng.integers(0, vocab, n).tolist() for n in lengths]

    result: dict[str, Any] = {"kv pages": core.info.num_blocks, "decode": {}, "features, ms": {}}
    for size in (1, 32, 64, 128, 256):
        drive(core, prompts([128] * size), [8] * size, {"temperature": 0.0})  # captures
        found = drive(core, prompts([128] * size), [256] * size, {"temperature": 0.0})
        row = {"median step ms": round(found["median step ms"], 3), "tokens/s": round(found["tokens/s"])}
        result["decode"][size] = row | beat(shape, f"decode {size}", found["median step ms"])
    for name, sampling in FEATURES.items():
        drive(core, prompts([16] * 256), [4] * 256, sampling)
        found = drive(core, prompts([16] * 256), [96] * 256, sampling)
        result["features, ms"][name] = round(found["median step ms"], 3)
    shared = prompts([1024])[0]
    asked = [shared + p for p in prompts([16] * 64)]
    result["prefix cache, 64 requests, 1,024 shared tokens"] = {}
    for name, given in (("nothing shared", prompts([1040] * 64)), ("cold, shared", asked), ("warm", asked)):
        hits = core.stats().prefix_hits
        found = drive(core, given, [1] * 64, {"temperature": 0.0})
        result["prefix cache, 64 requests, 1,024 shared tokens"][name] = {
            "first tokens after ms": round(1e3 * found["first s"], 1), "all after ms": round(1e3 * found["s"], 1),
            "prompt tokens found": core.stats().prefix_hits - hits, "of": 64 * 1040,
        }  # fmt: skip
    lengths = rng.integers(100, 1025, (2, 1000)).tolist()
    drive(core, prompts(lengths[0][:300]), [20] * 300, {"temperature": 0.0})
    found = drive(core, prompts(lengths[0]), lengths[1], {"temperature": 0.0})
    result["mixed, 1000 requests"] = {
        "output tokens/s": round(found["tokens/s"]), **beat(shape, "mixed", found["tokens/s"], more_is_better=True),
        "steps": found["steps"], "preemptions": core.stats().preemptions,
    }  # fmt: skip
    void = void_unless(check_tokens, outputs(core, prompts([128] * 8), 16, {"temperature": 0.0}))
    core.close()
    return {**result, **void}


def run(case: Case) -> Iterator[dict[str, Any]]:
    """Shape by shape, each in a process of its own."""
    for shape in case.shapes:
        folder = new_folder(shape)
        begin = time.perf_counter()
        compile_to(folder / "artifact", folder, "--max-model-len", "4096", "--load-format", "dummy")
        compiled = time.perf_counter() - begin
        yield {shape: {"compile s": round(compiled, 1), **in_process(measure, shape, folder)}}
