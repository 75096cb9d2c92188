"""A real model shape on this machine: graphllm from its artifact beside transformers, measured in turn in one run.

    python bench/real_size.py [--shape qwen2.5-0.5b] [--layers N] [--threads N] [--rounds N] [--out FILE.json]

Writes a checkpoint of random bf16 weights, compiles it, then starts one worker process for each system and lets them
take turns: start to first token, decode at batch 1 and 8, prefill of 1,024 tokens, peak memory. Medians over the
rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

SHAPES = {
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
        "hidden_act": "silu", "dtype": "bfloat16", "use_sliding_window": False,
    },
    # As wide, with 16 experts, two for each token: 1.24 billion numbers.
    "qwen3-moe-1.2b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 896,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64,
        "intermediate_size": 1024, "moe_intermediate_size": 1024, "num_experts": 16, "num_experts_per_tok": 2,
        "norm_topk_prob": True, "vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "tie_word_embeddings": True, "hidden_act": "silu", "dtype": "bfloat16",
    },
}  # fmt: skip
PREFILL, DECODE = 1024, 24


def make_checkpoint(folder: Path, config: dict) -> None:
    """config.json, one safetensors file of random weights, and a stand-in tokenizer."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if (folder / "model.safetensors").exists():
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    torch.manual_seed(0)
    tensors = {
        name: torch.ones(p.shape, dtype=torch.bfloat16) if "norm" in name else (torch.randn(p.shape) * 0.02).bfloat16()
        for name, p in model.named_parameters()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))


class Ours:
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
        import numpy as np

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


class Transformers:
    """transformers, eager, with its own cache."""

    def __init__(self, folder: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def measure(self, what: str, batch: int) -> float:
        torch = self.torch
        with torch.inference_mode():
            ids = torch.arange(PREFILL if what == "prefill" else 128)[None].repeat(batch, 1)
            start = time.perf_counter()
            out = self.model(ids, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1:].argmax(-1)
            if what == "prefill":
                return PREFILL / (time.perf_counter() - start)
            start = time.perf_counter()
            for _ in range(DECODE):
                out = self.model(token, past_key_values=out.past_key_values, use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
            return batch * DECODE / (time.perf_counter() - start)


def worker(system: str, folder: Path, artifact: Path, threads: int) -> None:
    """Serve measurements over stdin/stdout, one JSON line each; the first answer is sent after the first token."""
    made: Ours | Transformers = (
        Ours(folder, artifact, threads) if system == "graphllm" else Transformers(folder, threads)
    )
    if isinstance(made, Ours):
        made.step([list(range(16))], [0])
    else:
        with made.torch.inference_mode():
            made.model(made.torch.arange(16)[None])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        what, batch = json.loads(line)
        value = made.measure(what, batch)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"value": value, "peak": peak}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=SHAPES)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "graphllm-bench")
    parser.add_argument("--recompile", action="store_true")
    parser.add_argument("--worker", choices=("graphllm", "transformers"))
    args = parser.parse_args()
    config = dict(SHAPES[args.shape])
    if args.layers:
        config["num_hidden_layers"] = args.layers
    folder = args.keep / f"{args.shape}-{config['num_hidden_layers']}"
    artifact = folder / "artifact"
    if args.worker:
        worker(args.worker, folder, artifact, args.threads)
        return
    make_checkpoint(folder, config)
    result: dict = {"machine": cpu_name(), "threads": args.threads, "shape": args.shape,
                    "layers": config["num_hidden_layers"],
                    "versions": {p: version(p) for p in ("torch", "transformers", "graphllm")},
                    "python": platform.python_version(), "command": " ".join(sys.argv)}  # fmt: skip
    if args.recompile or not (artifact / "manifest.json").exists():
        start = time.perf_counter()
        command = ["graphllm", "compile", str(folder), "--max-model-len", "2048", "-o", str(artifact)]
        subprocess.run(command, check=True)
        result["compile s"] = round(time.perf_counter() - start, 2)
    base = [sys.executable, __file__, "--shape", args.shape, "--layers", str(config["num_hidden_layers"]),
            "--threads", str(args.threads), "--keep", str(args.keep)]  # fmt: skip
    starts: dict[str, list[float]] = {"graphllm": [], "transformers": []}
    for _ in range(3):
        for system, seconds in starts.items():
            start = time.perf_counter()
            process = open_worker(base, system)
            seconds.append(time.perf_counter() - start)
            process.kill()
            process.wait()
    result["start to first token s"] = {s: round(statistics.median(v), 2) for s, v in starts.items()}
    workers = {system: open_worker(base, system) for system in starts}
    cases = {"decode batch 1": ("decode", 1), "decode batch 8": ("decode", 8), "prefill 1024": ("prefill", 1)}
    for name, case in cases.items():
        found: dict[str, list[float]] = {s: [] for s in workers}
        for round_number in range(args.rounds + 1):
            for system, process in workers.items():
                answer = ask(process, case)
                if round_number:  # the first is a warm-up
                    found[system].append(answer["value"])
                result.setdefault("peak RSS GB", {})[system] = round(answer["peak"] / 1e9, 2)
        medians = {s: statistics.median(v) for s, v in found.items()}
        ratios = [a / b for a, b in zip(found["graphllm"], found["transformers"], strict=True)]
        result[f"{name}, tokens/s"] = {s: round(m, 2) for s, m in medians.items()} | {
            "ratio": round(statistics.median(ratios), 2),
            "rounds": {s: [round(x, 1) for x in v] for s, v in found.items()},
        }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text)


def open_worker(base: list[str], system: str) -> subprocess.Popen:
    """Start a worker and wait for its first token."""
    process = subprocess.Popen(
        [*base, "--worker", system], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={"GOMP_SPINCOUNT": "20000", **os.environ},
    )  # fmt: skip
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["ready"]
    return process


def ask(process: subprocess.Popen, case: tuple[str, int]) -> dict:
    """One measurement."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(case) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def cpu_name() -> str:
    """The processor's name and core count."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


if __name__ == "__main__":
    main()
