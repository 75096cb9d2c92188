"""Task accuracy of the embedded model in every scheme that its weights can be kept in, and in bf16.

Checkpoints are made by `graphllm quantize`, calibrated with questions of the training side, and by bitsandbytes.
Answers are greedy, from the compiled model.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from bench.cases.cpu.quantized import answers
from bench.harness import Case
from bench.training.evaluate import held_out
from bench.training.tasks import TASKS, mixture
from graphllm.embedded import MODEL_DIR
from graphllm.quantize.run import Request, quantize
from graphllm.weights.checkpoint.checkpoint import Checkpoint

QUESTIONS, SEED, CALIBRATION = 20, 1, 300
CASES = [("quantized_schemes", {"card": False})]
HELP = {"card": "write the table into the model's card, too"}
PACKAGES = ("bitsandbytes", "transformers")
LEAST = 0.99
"""Of bf16's accuracy, for all but 2- and 3-bit schemes."""


class Scheme(NamedTuple):
    """bits: of a weight of the layers, with scales. make: a checkpoint out of a folder to write to; None for the model
    as it is. options: of LLM."""

    name: str
    bits: float
    make: Callable[[Path], float] | None
    options: dict[str, Any]


def written(scheme: str, method: str = "rtn", group: int | None = None) -> Scheme:
    def make(folder: Path) -> float:
        text = folder.parent / "calibration.jsonl"
        wanted = Request(folder, scheme, method, text, group_size=group, samples=CALIBRATION)
        return quantize(MODEL_DIR, Checkpoint.open(MODEL_DIR), wanted, lambda line: None).bits

    groups = f", groups of {group}" if group else ""
    return Scheme(f"checkpoint: {scheme}, {method}{groups}", 0, make, {})


def bitsandbytes(kind: str, nested: bool) -> Scheme:
    """As transformers would write it."""

    def make(folder: Path) -> float:
        import bitsandbytes.functional as bnb

        shutil.copytree(MODEL_DIR, folder)
        tensors, made, bits, count = load_file(folder / "model.safetensors"), {}, 0, 0
        for name, tensor in tensors.items():
            if not name.endswith("proj.weight"):
                made[name] = tensor
                continue
            if kind == "int8":
                values, scales, _ = bnb.int8_vectorwise_quant(tensor.half())
                stem = name.removesuffix("weight")
                parts = {name: values, f"{stem}SCB": scales}
                made[f"{stem}weight_format"] = torch.tensor(0, dtype=torch.uint8)
            else:
                values, state = bnb.quantize_4bit(tensor, blocksize=64, compress_statistics=nested, quant_type=kind)
                stored = {f"{name}.{n}": t for n, t in state.as_dict(packed=True).items()}
                made |= {n: t for n, t in stored.items() if not n.endswith("absmax")}
                parts = {name: values} | {n: t for n, t in stored.items() if n.endswith("absmax")}
            made |= parts
            bits += 8 * sum(t.nbytes for t in parts.values())
            count += tensor.numel()
        save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {
            "quant_method": "bitsandbytes", "load_in_8bit": kind == "int8", "load_in_4bit": kind != "int8",
            "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        return bits / count

    return Scheme(f"checkpoint: bitsandbytes {kind}{', double quantization' * nested}", 0, make, {})


SCHEMES = (
    Scheme("bfloat16", 16, None, {}),
    Scheme("online: int8", 8.25, None, {"quantization": "int8"}),
    Scheme("online: int4", 4.5, None, {"quantization": "int4"}),
    Scheme("online: int4, head int8", 4.5, None, {"quantization": "int4", "quantization_rules": "lm_head=int8"}),
    written("fp8"),
    written("int8"),
    written("w8a8"),
    *(written("int4", method, 64) for method in ("rtn", "gptq", "awq")),
    *(written("int4-zeros", method, 64) for method in ("rtn", "gptq", "awq")),
    *(written("mxfp4", method) for method in ("rtn", "gptq", "awq")),
    *(bitsandbytes(*kind) for kind in (("nf4", False), ("nf4", True), ("fp4", False), ("int8", False))),
    *(written("int3", method, 64) for method in ("rtn", "gptq", "awq")),
    *(written("int2", method, 32) for method in ("rtn", "gptq", "awq")),
)


def calibration(file: Path) -> None:
    """Chats of the training side, never asked here, in the mixture that the model was trained on."""
    chats = itertools.islice(mixture(Random(7)), CALIBRATION)
    lines = [json.dumps({"messages": c.conversation(), "tools": c.tools or None}) for c in chats]
    file.write_text("\n".join(lines))


def run(case: Case) -> Iterator[dict[str, Any]]:
    """A row for each scheme."""
    samples = {name: held_out(name, QUESTIONS, SEED) for name in TASKS}
    flat = [sample for of in samples.values() for sample in of]
    rows, first, exact = [], [], 0.0
    with tempfile.TemporaryDirectory() as scratch:
        calibration(Path(scratch) / "calibration.jsonl")
        for number, scheme in enumerate(SCHEMES):
            folder, bits = Path(scratch) / str(number), scheme.bits
            if scheme.make is not None:
                bits = scheme.make(folder)
            texts = answers(MODEL_DIR if scheme.make is None else folder, flat, scheme.options)
            right = iter([s.accepts(t) for s, t in zip(flat, texts, strict=True)])
            mean = statistics.mean(statistics.mean(itertools.islice(right, len(of))) for of in samples.values())
            first, exact = first or texts, exact or mean
            same = statistics.mean(a == b for a, b in zip(first, texts, strict=True))
            rows.append(f"| {scheme.name} | {bits:.2f} | {mean:.2%} | {mean / exact:.2%} | {same:.2%} |")
            yield {
                scheme.name: {
                    "bits": round(bits, 2), "right, mean over tasks": round(mean, 4), "of bf16": round(mean / exact, 4),
                    "the same answer": round(same, 4), "questions": len(flat),
                }
            }  # fmt: skip
            if mean / exact < LEAST and "int2" not in scheme.name and "int3" not in scheme.name:
                print(f"{scheme.name}: below {LEAST:.0%} of bf16", file=sys.stderr)
    if case.card:
        write_card(len(flat), rows)


def write_card(questions: int, rows: list[str]) -> None:
    """The table, between marks in the model's README."""
    head = (
        "| weights of layers | bits | right, mean over tasks | of bf16 | the same answer |\n|---|---:|---:|---:|---:|"
    )
    made = (
        f"{questions} held-out questions, answered greedily on a CPU, where checkpoints are decoded to 16 bits: "
        "`python -m bench quantized_schemes`"
    )
    card, table = MODEL_DIR / "README.md", "\n".join((head, *rows))
    text = f"<!-- schemes -->\n## Quantized\n\n{made}\n\n{table}\n<!-- /schemes -->"
    found = re.sub(r"\n*<!-- schemes -->.*<!-- /schemes -->\n?", "", card.read_text(), flags=re.DOTALL)
    card.write_text(f"{found.rstrip()}\n\n{text}\n")
