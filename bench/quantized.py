"""Quantized weights beside 16 bits: task accuracy of the embedded model, error of logits, loading and speed of a shape.

    python bench/quantized.py [accuracy] [logits] [speed]    # all of them without a name

Prints Markdown. accuracy: held-out questions answered greedily by the compiled embedded model. logits: the shape of
Qwen2.5-0.5B with random weights, the error against float32, also of quantized weights alone, with nothing else rounded.
speed: the same shape, formats by turns in one run, two
threads, and how it compares with reading the weights once a step at the speed that memory is read.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from cpu_kernels import POOL, huge, read_ceiling
from real_size import SHAPES, Ours, cpu_name, make_checkpoint
from transformers import AutoTokenizer

from bench.training.evaluate import held_out
from bench.training.tasks import TASKS, Sample
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.embedded import MODEL_DIR
from graphllm.entrypoints.llm import LLM
from graphllm.weights.plan.plan import WeightPlan

FORMATS = ("bfloat16", "int8", "int4")
EXACT = {
    "float32": [],
    "int8, x not rounded": ["--quantization", "int8"],
    "int4, x not rounded": ["--quantization", "int4"],
}
QUESTIONS, SEED, THREADS, ROUNDS = 40, 1, 2, 7
KEEP = Path(tempfile.gettempdir()) / "graphllm-bench"


def answers(folder: Path, samples: list[Sample], options: dict[str, Any]) -> list[str]:
    """What a compiled model says to chats, greedily. options: of `LLM`."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    llm = LLM(folder, target="cpu", artifact="build", **options)
    prompts = [
        tokenizer.apply_chat_template(s.messages, tools=s.tools or None, add_generation_prompt=True, tokenize=False)
        for s in samples
    ]
    said = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=320), use_tqdm=False)
    llm.close()
    return [o.outputs[0].text for o in said]


def accuracy() -> None:
    """The same questions in each format; different answers than in 16 bits are counted too."""
    samples = {name: held_out(name, QUESTIONS, SEED) for name in TASKS}
    print(f"\n## Accuracy of the embedded model, {sum(map(len, samples.values()))} held-out questions\n")
    print("| weights | right, mean over tasks | tasks all right | answers other than in bf16 |\n|---|---|---|---|")
    first: list[str] = []
    for fmt in FORMATS:
        flat = [s for of in samples.values() for s in of]
        texts = answers(MODEL_DIR, flat, {"quantization": None if fmt == "bfloat16" else fmt})
        right = [s.accepts(t) for s, t in zip(flat, texts, strict=True)]
        shares, at = [], 0
        for of in samples.values():
            shares.append(sum(right[at : at + len(of)]) / len(of))
            at += len(of)
        first = first or texts
        other = sum(a != b for a, b in zip(first, texts, strict=True))
        print(f"| {fmt} | {statistics.mean(shares):.2%} | {sum(s == 1 for s in shares)} of {len(shares)} | {other} |")


def artifacts(exact: bool) -> tuple[Path, dict[str, Path]]:
    """A checkpoint of random weights in the shape, and an artifact of it for each format. exact: float32 ones too."""
    folder = KEEP / "quantized"
    make_checkpoint(folder, SHAPES["qwen2.5-0.5b"])
    options = {fmt: [] if fmt == "bfloat16" else ["--quantization", fmt] for fmt in FORMATS}
    if exact:
        options |= {name: ["--backend", "eager", "--dtype", "float32", *option] for name, option in EXACT.items()}
    places = {name: folder / name.replace(", ", "-").replace(" ", "-") for name in options}
    for name, place in places.items():
        command = ["compile", str(folder), "--max-model-len", "2048", "-o", str(place), *options[name]]
        subprocess.run([sys.executable, "-m", "graphllm.cli", *command], check=True, stdout=subprocess.DEVNULL)
    return folder, places


def worker(folder: Path, place: Path) -> None:
    """Load, then answer each line of stdin, what and batch, with a number or with logits in a file."""
    start = time.perf_counter()
    ours = Ours(folder, place, THREADS)
    print(json.dumps(time.perf_counter() - start), flush=True)
    ours.step([list(range(16))], [0])
    for line in sys.stdin:
        what, batch = json.loads(line)
        if what != "logits":
            print(json.dumps(ours.measure(what, batch)), flush=True)
            continue
        frames = []
        for at in range(8):  # prompts of 64 random tokens
            ids = torch.randint(0, 151936, (64,), generator=torch.Generator().manual_seed(at)).tolist()
            frames.append(logits(ours, ids))
        torch.save(torch.stack(frames), place / "logits.pt")
        print("0", flush=True)


def logits(ours: Ours, ids: list[int]) -> torch.Tensor:
    """Of the last token of a prompt."""
    ours.step([ids], [0])
    return next(reversed(ours.executor._main._bound.values())).results["logits"][0].float().clone()


def shape(wanted: list[str]) -> None:
    """Error of logits, seconds of loading, tokens per second."""
    folder, places = artifacts("logits" in wanted)
    bandwidth = read_ceiling(huge(POOL))
    env = {"GOMP_SPINCOUNT": "20000", **os.environ}
    workers: dict[str, subprocess.Popen[str]] = {}

    def start(fmt: str) -> float:
        workers[fmt] = subprocess.Popen(
            [sys.executable, __file__, "--worker", str(folder), str(places[fmt])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
        )  # fmt: skip
        return ask(fmt)

    def stop(fmt: str) -> None:
        process = workers.pop(fmt)
        process.kill()
        process.wait()

    def ask(fmt: str, *case: object) -> float:
        process = workers[fmt]
        assert process.stdin is not None
        assert process.stdout is not None
        if case:
            process.stdin.write(json.dumps(case) + "\n")
            process.stdin.flush()
        return float(json.loads(process.stdout.readline()))

    if "logits" in wanted:
        print("\n## Logits of Qwen2.5-0.5B's shape with random weights, 8 prompts of 64 tokens\n")
        print("| weights | relative error of logits | same likeliest token |\n|---|---|---|")
        found = {}
        for fmt in ("float32", *(f for f in places if f != "float32")):
            start(fmt)
            ask(fmt, "logits", 1)
            stop(fmt)
            found[fmt] = torch.load(places[fmt] / "logits.pt")
            error = (found[fmt] - found["float32"]).norm() / found["float32"].norm()
            same = (found[fmt].argmax(1) == found["float32"].argmax(1)).sum()
            print(f"| {fmt} | {error:.4f} | {same} of 8 |", flush=True)
    if "speed" in wanted:
        loading = {fmt: start(fmt) for fmt in FORMATS}
        plans = {fmt: WeightPlan.from_json((places[fmt] / "weights.json").read_text()) for fmt in FORMATS}
        # A step reads all weights but the embedding, of which it reads a row, unless the head is the same memory.
        streamed = {
            fmt: plan.total_bytes - (0 if fmt == "bfloat16" else plan["embed.tokens"].nbytes)
            for fmt, plan in plans.items()
        }
        cases = {"decode batch 1": ("decode", 1), "decode batch 8": ("decode", 8), "prefill 1024": ("prefill", 1)}
        rates: dict[str, dict[str, list[float]]] = {name: {fmt: [] for fmt in FORMATS} for name in cases}
        for name, case in cases.items():
            for number in range(ROUNDS + 1):
                for fmt in FORMATS:
                    rate = ask(fmt, *case)
                    if number:  # the first is a warm-up
                        rates[name][fmt].append(rate)
        print(f"\n## Qwen2.5-0.5B's shape, {THREADS} threads, tokens/s: median (best) of {ROUNDS}; memory is read at "
              f"{bandwidth:.1f} GB/s\n")  # fmt: skip
        print("| weights | MB in memory | MB a step | s to load | " + " | ".join(cases) + " | batch 1 of the floor |")
        print("|---" * (len(cases) + 5) + "|")
        for fmt in FORMATS:
            floor = bandwidth * 1e9 / streamed[fmt]
            cells = [f"{statistics.median(of[fmt]):.1f} ({max(of[fmt]):.1f})" for of in rates.values()]
            share = statistics.median(rates["decode batch 1"][fmt]) / floor
            print(f"| {fmt} | {plans[fmt].total_bytes / 1e6:.0f} | {streamed[fmt] / 1e6:.0f} | {loading[fmt]:.2f} | "
                  + " | ".join(cells) + f" | {share:.0%} |")  # fmt: skip
        for fmt in FORMATS:
            stop(fmt)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), Path(sys.argv[3]))
        return
    wanted = sys.argv[1:] or ["accuracy", "logits", "speed"]
    torch.set_num_threads(THREADS)
    print(f"{cpu_name()}, torch {torch.__version__}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}: "
          f"python bench/quantized.py {' '.join(wanted)}")  # fmt: skip
    if "accuracy" in wanted:
        accuracy()
    if {"logits", "speed"} & set(wanted):
        shape(wanted)


if __name__ == "__main__":
    main()
