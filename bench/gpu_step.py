"""Step times of real model shapes on one GPU, from a compiled artifact in a fresh process, with the start-up breakdown.

    python bench/gpu_step.py [--shapes llama3.1-8b,qwen3-0.6b] [--out FILE.json] [--weights-on-disk]

Random bf16 weights. A step is what serving does: stage the batch, copy it, replay, fetch the tokens. Each shape is
compiled by `graphllm compile` and measured in a worker process that loads the artifact.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

SHAPES = {
    "llama3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "dtype": "bfloat16", "head_dim": 128, "attention_bias": False,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu",
        "tie_word_embeddings": True, "dtype": "bfloat16", "head_dim": 128, "attention_bias": False,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936, "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu", "tie_word_embeddings": False,
        "dtype": "bfloat16", "head_dim": 128, "attention_bias": False,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
        "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088, "max_position_embeddings": 131072,
        "sliding_window": 128, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "dtype": "bfloat16",
    },
}  # fmt: skip
SHAPES |= {
    "llama3.1-8b-fp8": {**SHAPES["llama3.1-8b"], "quantization_config": {"quant_method": "fbgemm_fp8"}},
    "llama3.1-8b-awq": {**SHAPES["llama3.1-8b"], "quantization_config": {"quant_method": "awq", "bits": 4,
                        "group_size": 128, "zero_point": True, "version": "gemm"}},
    "llama3-70b": {**SHAPES["llama3.1-8b"], "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
                   "intermediate_size": 28672},
    "gpt-oss-20b-mxfp4": {**SHAPES["gpt-oss-20b"], "quantization_config": {"quant_method": "mxfp4"}},
}  # fmt: skip
VLLM = {("llama3.1-8b", 1): 4.93, ("llama3.1-8b", 32): 5.55, ("llama3.1-8b", 64): 6.15, ("llama3.1-8b", 128): 7.42,
        ("llama3.1-8b", 256): 11.44,
        ("qwen3-0.6b", 1): 2.31, ("qwen3-0.6b", 64): 2.96, ("qwen3-0.6b", 256): 8.09,
        ("qwen3-30b-a3b", 1): 4.12, ("qwen3-30b-a3b", 32): 15.8, ("qwen3-30b-a3b", 128): 18.9}  # fmt: skip
CONTEXT, STEPS = 256, 100
COMPILERS = ("torch._inductor", "torch._dynamo", "triton")  # modules that serving must not load


def worker(folder: Path, artifact: Path) -> None:
    """Load the artifact, run the cases, print one JSON line."""
    clock = [("process", time.perf_counter())]

    def mark(name: str) -> None:
        clock.append((name, time.perf_counter()))

    from graphllm.program.artifact import Artifact

    opened = Artifact.open(artifact)
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
    real = (folder / "model.safetensors.index.json").exists()
    weights = load_weights(plan, Checkpoint.open(folder), "cuda") if real else random_weights(plan, "cuda")
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
    result: dict = {"start-up s": phases, "decode": {}, "prefill": {}}
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
        result["decode"][size] = {
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
            result["prefill"][size] = round(statistics.median(times[1:]), 2)
    print(json.dumps(result), flush=True)


def batch(size: int, tokens: int, start: int, executor):
    """``size`` sequences with ``tokens`` new tokens each after ``start`` cached ones."""
    import numpy as np

    from graphllm.runtime.memory.staging import ragged

    blocks = -(-(start + tokens) // executor.layout.groups[0].block_size)
    rng = np.random.default_rng(0)
    table = rng.permutation(size * blocks).astype(np.int32).reshape(size, blocks)
    return ragged(rng.integers(0, 1000, (size, tokens)), [start] * size, [table])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llama3.1-8b,qwen3-0.6b")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--weights-on-disk", action="store_true", help="write a checkpoint first, and load it")
    parser.add_argument("--compile", default="", help="more options for graphllm compile")
    parser.add_argument("--worker", nargs=2, type=Path)
    args = parser.parse_args()
    if args.worker:
        worker(*args.worker)
        return
    results: dict = {"versions": {p: version(p) for p in ("torch", "triton")}, "command": " ".join(sys.argv)}
    for shape in args.shapes.split(","):
        folder = Path(tempfile.mkdtemp(prefix=f"{shape}-"))
        (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
        if args.weights_on_disk:
            write_checkpoint(folder)
        start = time.perf_counter()
        command = [sys.executable, "-m", "graphllm.cli", "compile", str(folder), "-o", str(folder / "artifact"),
                   "--max-model-len", "16384", *args.compile.split()]  # fmt: skip
        if not args.weights_on_disk:
            command += ["--load-format", "dummy"]
        subprocess.run(command, check=True)
        compiled = time.perf_counter() - start
        start = time.perf_counter()
        run = [sys.executable, __file__, "--worker", str(folder), str(folder / "artifact")]
        done = subprocess.run(run, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            results[shape] = {"failed": done.returncode}
            continue
        found = json.loads(done.stdout.splitlines()[-1]) | {"compile s": round(compiled, 1)}
        for size, row in found["decode"].items():
            if peer := VLLM.get((shape, int(size))):
                row["vLLM 0.26 ms"], row["speed-up"] = peer, round(peer / row["ms"], 2)
        results[shape] = found
    text = json.dumps(results, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text)


def write_checkpoint(folder: Path) -> None:
    """Random weights in the names that checkpoints have, a safetensors file for each layer; they are in the page cache
    afterwards. Experts have a tensor each, as they are published."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    files: dict[str, dict[str, torch.Size]] = {}
    for name, parameter in model.named_parameters():
        layer = re.search(r"\.layers\.(\d+)\.", name)
        shapes = files.setdefault(f"layer-{layer[1]}.safetensors" if layer else "rest.safetensors", {})
        if name.endswith(".experts.gate_up_proj"):
            parts = {"gate_proj": parameter[0].chunk(2)[0], "up_proj": parameter[0].chunk(2)[1]}
        elif name.endswith(".experts.down_proj"):
            parts = {"down_proj": parameter[0]}
        else:
            shapes[name] = parameter.shape
            continue
        stem = name.rpartition(".")[0]
        shapes |= {f"{stem}.{i}.{k}.weight": p.shape for i in range(len(parameter)) for k, p in parts.items()}
    for file, shapes in files.items():
        tensors = {n: (torch.randn(s, device=device) * 0.02).bfloat16().cpu() for n, s in shapes.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, shapes in files.items() for name in shapes}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def busy_time(spans: Sequence[tuple[float, float]]) -> float:
    """How long at least one of them runs, of spans (start, end) in the order of their starts."""
    busy, until = 0.0, -math.inf
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy


if __name__ == "__main__":
    main()
