"""The engine core on one GPU: steps as requests see them, what each sampling feature costs, and throughput.

    python bench/gpu_engine.py [--shapes qwen3-0.6b,llama3.1-8b] [--out FILE.json]

Real shapes, random bf16 weights. decode: 128 tokens in, 256 out, greedy, all requests at once. features: 256 requests,
the same with each kind of sampling. mixed: 1,000 requests, 100 to 1,024 tokens in and out, all queued at the beginning.
prefix: 64 requests that share 1,024 tokens, time to their first tokens.
Figures of vLLM 0.26 on the same kind of GPU stand beside those that have one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
from gpu_step import SHAPES, VLLM

# Output tokens/s of vLLM 0.26 in the mixed case.
MIXED = {"llama3.1-8b": 10879, "qwen3-0.6b": 18060}
FEATURES = {
    "greedy": {"temperature": 0.0},
    "plain sampling": {"temperature": 1.0},
    "top-k 20, top-p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "logit bias": {"temperature": 0.0, "logit_bias": dict.fromkeys(range(100), 1.0)},
    "allowed token ids": {"temperature": 0.0, "allowed_token_ids": tuple(range(1000, 2000))},
    "logprobs 5": {"temperature": 0.0, "logprobs": 5},
}


def add(core, prompts: list[list[int]], limits: list[int], sampling: dict, first: int = 0) -> None:
    """Queue requests that end at their limits, numbered from ``first``: ids of requests that run must differ."""
    from graphllm.config.requests.sampling_params import SamplingParams
    from graphllm.engine.requests.request import EngineRequest

    for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True), first):
        params = SamplingParams(max_tokens=limit, ignore_eos=True, seed=i, **sampling)
        core.add(EngineRequest(id=str(i), prompt=prompt, params=params, stop_ids=[], limit=limit, seed=i))


def run(core, prompts: list[list[int]], limits: list[int], sampling: dict) -> dict:
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


def measure(shape: str) -> dict:
    """One shape, all cases."""
    from graphllm.config import EngineArgs
    from graphllm.loading.artifact.model import resolve_model
    from graphllm.loading.core.load import load_core

    folder = Path(tempfile.mkdtemp(prefix=f"{shape}-"))
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    artifact = folder / "artifact"
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "graphllm.cli", "compile", str(folder), "-o", str(artifact), "--max-model-len", "4096",
         "--load-format", "dummy"], check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    compiled = time.perf_counter() - begin
    args = EngineArgs(folder, load_format="dummy", artifact=artifact, skip_tokenizer_init=True)
    core = load_core(resolve_model(args).config)
    rng = np.random.default_rng(0)
    vocab = SHAPES[shape]["vocab_size"]

    def prompts(lengths: list[int]) -> list[list[int]]:
        return [rng.integers(0, vocab, n).tolist() for n in lengths]

    result: dict = {"compile s": round(compiled, 1), "kv pages": core.info.num_blocks, "decode": {}, "features": {}}
    for size in (1, 32, 64, 128, 256):
        run(core, prompts([128] * size), [8] * size, {"temperature": 0.0})  # captures
        found = run(core, prompts([128] * size), [256] * size, {"temperature": 0.0})
        row = {"median step ms": round(found["median step ms"], 3), "tokens/s": round(found["tokens/s"])}
        if peer := VLLM.get((shape, size)):
            row |= {"vLLM 0.26 ms": peer, "speed-up": round(peer / found["median step ms"], 2)}
        result["decode"][size] = row
    for name, sampling in FEATURES.items():
        run(core, prompts([16] * 256), [4] * 256, sampling)
        found = run(core, prompts([16] * 256), [96] * 256, sampling)
        result["features"][name] = round(found["median step ms"], 3)
    shared = prompts([1024])[0]
    asked = [shared + p for p in prompts([16] * 64)]
    result["prefix cache, 64 requests, 1,024 shared tokens"] = {}
    for name, given in (("nothing shared", prompts([1040] * 64)), ("cold, shared", asked), ("warm", asked)):
        hits = core.stats().prefix_hits
        found = run(core, given, [1] * 64, {"temperature": 0.0})
        result["prefix cache, 64 requests, 1,024 shared tokens"][name] = {
            "first tokens after ms": round(1e3 * found["first s"], 1), "all after ms": round(1e3 * found["s"], 1),
            "prompt tokens found": core.stats().prefix_hits - hits, "of": 64 * 1040,
        }  # fmt: skip
    lengths = rng.integers(100, 1025, (2, 1000)).tolist()
    run(core, prompts(lengths[0][:300]), [20] * 300, {"temperature": 0.0})
    found = run(core, prompts(lengths[0]), lengths[1], {"temperature": 0.0})
    result["mixed, 1000 requests"] = {
        "output tokens/s": round(found["tokens/s"]), "vLLM 0.26": MIXED[shape],
        "speed-up": round(found["tokens/s"] / MIXED[shape], 2), "steps": found["steps"],
        "preemptions": core.stats().preemptions,
    }  # fmt: skip
    core.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--shape", help="one shape in this process")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.shape:
        print(json.dumps(measure(args.shape)))
        return
    import torch

    result: dict = {"machine": torch.cuda.get_device_name(), "versions": {p: version(p) for p in ("torch", "triton")},
                    "command": " ".join(sys.argv)}  # fmt: skip
    for shape in args.shapes.split(","):
        done = subprocess.run([sys.executable, __file__, "--shape", shape], stdout=subprocess.PIPE, text=True)
        result[shape] = (
            json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"failed": done.returncode}
        )
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
