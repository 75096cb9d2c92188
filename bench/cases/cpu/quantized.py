"""Quantized weights and 16 bits: task accuracy of the embedded model, error of logits, loading and speed of a shape.

    python -m bench quantized [--parts accuracy,logits,speed]

accuracy: held-out questions answered greedily by the compiled embedded model. logits: the shape of
Qwen2.5-0.5B with random weights, the error against float32, also of quantized weights with nothing else rounded.
speed: the same shape, formats by turns in one run, two
threads, and how it compares with reading the weights once a step at the speed that memory is read.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from bench.cpu.checkpoint import config_of, make_checkpoint
from bench.driving import Stepper
from bench.harness import Case, in_turn, worker_command, worker_environment
from bench.models import compile_to
from bench.probe import POOL, huge, read_ceiling
from bench.process import Commands, Process
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
CASES = [("quantized", {"parts": ("accuracy", "logits", "speed")})]
PACKAGES = ("transformers",)
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


def accuracy() -> dict[str, Any]:
    """The same questions in each format; different answers than in 16 bits are counted too."""
    samples = {name: held_out(name, QUESTIONS, SEED) for name in TASKS}
    found: dict[str, Any] = {}
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
        found[f"accuracy, {fmt}"] = {
            "questions": len(flat), "right, mean over tasks": round(statistics.mean(shares), 4),
            "tasks all right": f"{sum(s == 1 for s in shares)} of {len(shares)}", "other answers than bf16": other,
        }  # fmt: skip
    return found


def artifacts(exact: bool) -> tuple[Path, dict[str, Path]]:
    """A checkpoint of random weights in the shape, and an artifact of it for each format. exact: float32 ones too."""
    folder = KEEP / "quantized"
    make_checkpoint(folder, config_of("qwen2.5-0.5b"))
    options = {fmt: [] if fmt == "bfloat16" else ["--quantization", fmt] for fmt in FORMATS}
    if exact:
        options |= {name: ["--backend", "eager", "--dtype", "float32", *option] for name, option in EXACT.items()}
    places = {name: folder / name.replace(", ", "-").replace(" ", "-") for name in options}
    for name, place in places.items():
        compile_to(place, folder, "--max-model-len", "2048", *options[name])
    return folder, places


def serve(commands: Commands, folder: str, place: str) -> None:
    """A process that has loaded an artifact answers each command, what and batch, with a number; logits are in a
    file."""
    start = time.perf_counter()
    ours = Stepper(Path(folder), Path(place), THREADS)
    commands.answer(time.perf_counter() - start)
    ours.step([list(range(16))], [0])
    for what, batch in commands:
        if what != "logits":
            commands.answer(ours.measure(what, batch))
            continue
        frames = []
        for at in range(8):  # prompts of 64 random tokens
            ids = torch.randint(0, 151936, (64,), generator=torch.Generator().manual_seed(at)).tolist()
            frames.append(logits(ours, ids))
        torch.save(torch.stack(frames), Path(place) / "logits.pt")
        commands.answer(0)
    commands.answer(0)


def logits(ours: Stepper, ids: list[int]) -> torch.Tensor:
    """Of the last token of a prompt."""
    ours.step([ids], [0])
    return next(reversed(ours.executor._main._bound.values())).results["logits"][0].float().clone()


def started(folder: Path, place: Path) -> Process:
    """The process of an artifact."""
    return Process(worker_command("serve", serve, folder, place), worker_environment())


def errors(folder: Path, places: dict[str, Path]) -> dict[str, Any]:
    """Of the logits of 8 prompts of 64 tokens, against float32."""
    found: dict[str, Any] = {}
    frames: dict[str, torch.Tensor] = {}
    for fmt in ("float32", *(f for f in places if f != "float32")):
        with started(folder, places[fmt]) as process:
            process.started()
            process.ask(("logits", 1))
        frames[fmt] = torch.load(places[fmt] / "logits.pt")
        error = (frames[fmt] - frames["float32"]).norm() / frames["float32"].norm()
        same = (frames[fmt].argmax(1) == frames["float32"].argmax(1)).sum()
        found[f"logits, {fmt}"] = {
            "relative error": round(float(error), 4),
            "same likeliest token": f"{int(same)} of 8",
        }
    return found


def speed(folder: Path, places: dict[str, Path]) -> dict[str, Any]:
    """Seconds of loading and tokens a second, formats in turn; and the share of the floor that batch 1 reaches."""
    bandwidth = read_ceiling(huge(POOL))
    plans = {fmt: WeightPlan.from_json((places[fmt] / "weights.json").read_text()) for fmt in FORMATS}
    # A step reads all weights but the embedding (only a row of it), unless the head is the same memory.
    streamed = {
        fmt: plan.total_bytes - (0 if fmt == "bfloat16" else plan["embed.tokens"].nbytes) for fmt, plan in plans.items()
    }
    cases = {"decode batch 1": ("decode", 1), "decode batch 8": ("decode", 8), "prefill 1024": ("prefill", 1)}
    with contextlib.ExitStack() as stack:
        workers = {fmt: stack.enter_context(started(folder, places[fmt])) for fmt in FORMATS}
        loading = {fmt: worker.started() for fmt, worker in workers.items()}
        rates = {
            name: in_turn(ROUNDS, FORMATS, lambda fmt, command=command: workers[fmt].ask(command), warm=1)  # type: ignore[misc]
            for name, command in cases.items()
        }
    found: dict[str, Any] = {"speed, memory": {"read GB/s": round(bandwidth, 1)}}
    for fmt in FORMATS:
        medians = {f"{name}, tokens/s": round(statistics.median(of[fmt]), 1) for name, of in rates.items()}
        best = {f"{name}, best": round(max(of[fmt]), 1) for name, of in rates.items()}
        floor = bandwidth * 1e9 / streamed[fmt]
        found[f"speed, {fmt}"] = {
            **medians, "batch 1 of the floor": round(statistics.median(rates["decode batch 1"][fmt]) / floor, 3),
            "MB in memory": round(plans[fmt].total_bytes / 1e6), "MB a step": round(streamed[fmt] / 1e6),
            "s to load": round(loading[fmt], 2), **best,
        }  # fmt: skip
    return found


def run(case: Case) -> Iterator[dict[str, Any]]:
    """The parts in turn."""
    torch.set_num_threads(THREADS)
    if "accuracy" in case.parts:
        yield accuracy()
    if {"logits", "speed"} & set(case.parts):
        folder, places = artifacts("logits" in case.parts)
        if "logits" in case.parts:
            yield errors(folder, places)
        if "speed" in case.parts:
            yield speed(folder, places)
