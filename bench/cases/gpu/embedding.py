"""Tokens a second of a decoder that makes vectors: 1,000 prompts of one length at once, through `LLM.embed`.

Random weights in bf16, random tokens, the last token's vector. Each figure is the median of three runs after one that
warms up; the floor is the time of the products and of causal attention at 788 TFLOP/s, as measured on an H200.
vLLM 0.26 on that GPU: 249,575 tokens/s of prompts of 128, 336,961 of 512.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.driving import is_work, traced_events
from bench.harness import Case
from bench.models import SHAPES, write_config

CASES = [
    ("embedding", {"shape": "qwen3-0.6b", "layers": 0, "lengths": (128, 512), "prompts": 1000, "batched_tokens": 16384,
                   "target": "cuda", "trace": False}),
]  # fmt: skip
HELP = {"layers": "fewer layers, to try the program out", "trace": "list the kernels of one run"}
ARITHMETIC = 788e12
TARGETS = {128: (350_000, 400_000), 512: (450_000, 475_000)}  # of qwen3-0.6b: first target and goal


def floor(c: dict[str, Any], length: int) -> float:
    """Tokens a second, if nothing but arithmetic took time."""
    D, F, E = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    H, K = c["num_attention_heads"], c["num_key_value_heads"]
    layer = 2 * (D * (H + 2 * K) * E + H * E * D + 3 * D * F) + 4 * H * E * (length + 1) / 2
    return ARITHMETIC / (c["num_hidden_layers"] * layer)


def run(args: Case) -> Iterator[dict[str, Any]]:
    """By length of the prompts."""
    from graphllm import LLM

    changes = {"num_hidden_layers": args.layers} if args.layers else {}
    config, lengths = SHAPES[args.shape] | changes, args.lengths
    with tempfile.TemporaryDirectory() as place:
        write_config(Path(place), args.shape, **changes)
        llm = LLM(
            place, runner="pooling", load_format="dummy", skip_tokenizer_init=True, target=args.target,
            max_model_len=max(lengths) + 32, max_num_batched_tokens=args.batched_tokens, max_num_seqs=256,
        )  # fmt: skip
        draw = np.random.default_rng(0)

        def timed(length: int) -> float:
            prompts = [{"prompt_token_ids": row} for row in draw.integers(0, 1000, (args.prompts, length)).tolist()]
            begun = time.perf_counter()
            outputs = llm.embed(prompts, use_tqdm=False)
            taken = time.perf_counter() - begun
            assert all(abs(np.linalg.norm(o.outputs.embedding) - 1) < 1e-2 for o in outputs)
            return args.prompts * length / taken

        for length in lengths:
            runs = [timed(length) for _ in range(4)][1:]
            median, most = statistics.median(runs), floor(config, length)
            found: dict[str, Any] = {
                "tokens/s": round(median), "runs": [round(r) for r in runs], "floor": round(most),
                "share": round(median / most, 3), "targets": TARGETS.get(length),
            }  # fmt: skip
            if args.trace:
                found["traced"] = traced(lambda: timed(length))  # noqa: B023
            yield {f"{length} tokens": found}
        llm.close()


def traced(call: Any) -> dict[str, Any]:
    """The share of time in which the GPU works, and the ms of each kernel."""
    kernels = [e for e in traced_events(call) if is_work(e)]
    spent: dict[str, float] = {}
    for e in kernels:
        name = e["name"][:70]
        spent[name] = spent.get(name, 0.0) + e["dur"] / 1e3
    span = (max(e["ts"] + e["dur"] for e in kernels) - min(e["ts"] for e in kernels)) / 1e3
    most = sorted(spent.items(), key=lambda item: -item[1])[:20]
    return {
        "ms": round(span, 1),
        "busy": round(sum(spent.values()) / span, 3),
        "kernels": {n: round(t, 2) for n, t in most},
    }
