"""Tokens a second of a decoder that makes vectors: 1,000 prompts of one length at once, through `LLM.embed`.

    python bench/embedding.py [--shape qwen3-0.6b] [--lengths 128,512] [--batched-tokens 16384] [--trace] [--out F.json]

Random weights in bf16, random tokens, the last token's vector. Each figure is the median of three runs behind one that
warms up; the floor is the time of the products and of causal attention at 788 TFLOP/s, as measured on an H200.
vLLM 0.26 on that GPU: 249,575 tokens/s of prompts of 128, 336,961 of 512.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from gpu_step import SHAPES

ARITHMETIC = 788e12
TARGETS = {128: (350_000, 400_000), 512: (450_000, 475_000)}  # of qwen3-0.6b: first target and goal


def floor(c: dict[str, Any], length: int) -> float:
    """Tokens a second, if nothing but arithmetic took time."""
    D, F, E = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    H, K = c["num_attention_heads"], c["num_key_value_heads"]
    layer = 2 * (D * (H + 2 * K) * E + H * E * D + 3 * D * F) + 4 * H * E * (length + 1) / 2
    return ARITHMETIC / (c["num_hidden_layers"] * layer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers, to try the program out")
    parser.add_argument("--lengths", default="128,512")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--batched-tokens", type=int, default=16384)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--trace", action="store_true", help="list the kernels of one run")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from graphllm import LLM

    config = SHAPES[args.shape] | ({"num_hidden_layers": args.layers} if args.layers else {})
    found: dict[str, Any] = {"command": " ".join(sys.argv), "versions": {"torch": version("torch")}}
    lengths = [int(n) for n in args.lengths.split(",")]
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps(config))
        llm = LLM(
            place, runner="pooling", load_format="dummy", skip_tokenizer_init=True, target=args.device,
            max_model_len=max(lengths) + 32, max_num_batched_tokens=args.batched_tokens, max_num_seqs=256,
        )  # fmt: skip
        draw = np.random.default_rng(0)

        def run(length: int) -> float:
            prompts = [{"prompt_token_ids": row} for row in draw.integers(0, 1000, (args.prompts, length)).tolist()]
            begun = time.perf_counter()
            outputs = llm.embed(prompts, use_tqdm=False)
            taken = time.perf_counter() - begun
            assert all(abs(np.linalg.norm(o.outputs.embedding) - 1) < 1e-2 for o in outputs)
            return args.prompts * length / taken

        for length in lengths:
            runs = [run(length) for _ in range(4)][1:]
            median, most = statistics.median(runs), floor(config, length)
            found[f"{length} tokens"] = {
                "tokens/s": round(median), "runs": [round(r) for r in runs], "floor": round(most),
                "share": round(median / most, 3), "targets": TARGETS.get(length),
            }  # fmt: skip
            if args.trace:
                found[f"{length} tokens"]["traced"] = traced(lambda: run(length))  # noqa: B023
            print(json.dumps(found), flush=True)
            if args.out:
                args.out.write_text(json.dumps(found, indent=1) + "\n")
        llm.close()


def traced(call: Any) -> dict[str, Any]:
    """The share of time in which the GPU works, and the ms of each kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
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


if __name__ == "__main__":
    main()
