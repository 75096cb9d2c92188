"""What `LLM` adds to the engine core on one GPU: the same requests given to the core and to `LLM`, in turn.

    python -m bench gpu_generate_host [--shapes qwen3-0.6b,llama3.1-8b] [--sizes 1,64,256] [--runs 3]
    python -m bench gpu_embed_host [--lengths 128,512] [--runs 3]

Real shapes, random weights in bf16, one process and one engine for both. gpu_generate_host: ms a step of decoding,
128 tokens in and 257 out, less the same requests with one token out. gpu_embed_host: tokens/s of 1,000 prompts of one
length; the core's requests are made before its clock starts. The ratio is of medians, above 1 where `LLM` is slower.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.driving import add
from bench.harness import Case, check_tokens, in_process, in_turn
from bench.models import SHAPES, write_config

CASES = [
    ("gpu_generate_host", {"shapes": ("qwen3-0.6b", "llama3.1-8b"), "sizes": (1, 8, 32, 64, 128, 256), "runs": 3,
                           "steps": 256, "target": "cuda"}),
    ("gpu_embed_host", {"shapes": ("qwen3-0.6b",), "lengths": (128, 512), "prompts": 1000, "runs": 3,
                        "target": "cuda"}),
]  # fmt: skip
HELP = {"sizes": "requests at once", "steps": "steps of decoding", "lengths": "tokens of a prompt"}


def open_llm(folder: str, target: str, **options: Any) -> Any:
    """With random weights."""
    from graphllm import LLM

    return LLM(folder, load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False, target=target,
               max_model_len=1024, **options)  # fmt: skip


def ratios(runs: int, measured: dict[str, Callable[[], float]], more_is_better: bool) -> dict[str, Any]:
    """Figures of the core and of `LLM`, in turn after a round that warms up, and the ratio of their medians."""
    found = in_turn(runs, measured, lambda name: round(measured[name](), 4), warm=1, order="mirrored")
    core, llm = (statistics.median(found[name]) for name in ("core", "LLM"))
    return {**found, "ratio": round(core / llm if more_is_better else llm / core, 4)}


def generate(shape: str, folder: str, sizes: list[int], runs: int, steps: int, target: str) -> dict[str, Any]:
    """Of one shape, in this process."""
    from graphllm import SamplingParams

    llm = open_llm(folder, target)
    core, rng, vocab = llm.llm_engine.core, np.random.default_rng(0), SHAPES[shape]["vocab_size"]

    def drawn(size: int) -> list[list[int]]:
        return rng.integers(0, vocab, (size, 128)).tolist()

    def by_core(size: int, tokens: int) -> float:
        prompts = drawn(size)
        begin = time.perf_counter()
        add(core, prompts, [tokens] * size, {"temperature": 0.0})
        while core.unfinished:
            core.step()
        return time.perf_counter() - begin

    def by_llm(size: int, tokens: int) -> float:
        prompts = [{"prompt_token_ids": prompt} for prompt in drawn(size)]
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        if tokens > 1:
            check_tokens([output.outputs[0].token_ids for output in outputs])
        return seconds

    found = {}
    for size in sizes:
        measured = {
            name: lambda by=by, size=size: 1e3 * (by(size, 1 + steps) - by(size, 1)) / steps
            for name, by in (("core", by_core), ("LLM", by_llm))
        }
        found[f"ms a step of {size}"] = ratios(runs, measured, more_is_better=False)
    llm.close()
    return found


def embed(shape: str, folder: str, lengths: list[int], prompts: int, runs: int, target: str) -> dict[str, Any]:
    """Of one shape, in this process."""
    from graphllm import PoolingParams

    llm = open_llm(folder, target, runner="pooling", max_num_batched_tokens=16384, max_num_seqs=256)
    engine, rng, params = llm.llm_engine, np.random.default_rng(0), PoolingParams()

    def drawn(length: int) -> list[dict[str, list[int]]]:
        return [{"prompt_token_ids": row} for row in rng.integers(0, 1000, (prompts, length)).tolist()]

    def by_core(length: int) -> float:
        made = [engine.pooling.make(p, params, f"core {i}", task="embed") for i, p in enumerate(drawn(length))]
        begin = time.perf_counter()
        for one in made:
            engine.core.add(one.request)
        while engine.core.unfinished:
            engine.core.step()
        return prompts * length / (time.perf_counter() - begin)

    def by_llm(length: int) -> float:
        given = drawn(length)
        begin = time.perf_counter()
        outputs = llm.embed(given, use_tqdm=False)
        seconds = time.perf_counter() - begin
        assert all(abs(np.linalg.norm(output.outputs.embedding) - 1) < 1e-2 for output in outputs)
        assert np.ptp([output.outputs.embedding[0] for output in outputs]), (
            "the work is not real: all vectors are equal"
        )
        return prompts * length / seconds

    found = {}
    for length in lengths:
        measured = {"core": lambda n=length: by_core(n), "LLM": lambda n=length: by_llm(n)}
        found[f"tokens/s of prompts of {length}"] = ratios(runs, measured, more_is_better=True)
    llm.close()
    return found


def run(case: Case) -> Iterator[dict[str, Any]]:
    """Shape by shape, each in a process of its own."""
    for shape in case.shapes:
        with tempfile.TemporaryDirectory() as place:
            folder = write_config(Path(place), shape)
            if case.case == "gpu_embed_host":
                found = in_process(embed, shape, folder, case.lengths, case.prompts, case.runs, case.target)
            else:
                found = in_process(generate, shape, folder, case.sizes, case.runs, case.steps, case.target)
            yield {shape: found}
