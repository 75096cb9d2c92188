"""Where the seconds of `graphllm compile` go on a CPU, for the embedded model and for the Qwen2.5-0.5B shape.

    python bench/compile_time.py [--runs N] [--depth [SHAPE]] [--out FILE.json]

Each compile is a process of its own; the models take turns. "first": with an empty cache, "again": after it, with
another --max-model-len, "int8" and "int4": the same after it. Prints medians of the whole process and of its stages.
What is listed under g++ runs beside them. --depth: only one shape, with 4 layers and with all of its own, and their
ratio; a shape of bench/gpu_step.py is compiled for the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import gpu_step
from real_size import SHAPES

from graphllm.embedded import MODEL_DIR
from graphllm.host.machine import compiler_version, detect_target, usable_cores
from graphllm.program.artifact import Artifact

DUMMY = ("--load-format", "dummy")
KINDS: dict[str, tuple[str, ...]] = {
    "first": ("--max-model-len", "512"),
    "again": ("--max-model-len", "384"),
    "int8": ("--max-model-len", "512", "--quantization", "int8"),
    "int4": ("--max-model-len", "512", "--quantization", "int4"),
}


def shape(folder: Path, name: str = "qwen2.5-0.5b", **changes: int) -> Path:
    """A folder with the config.json of the shape."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SHAPES, **gpu_step.SHAPES}[name] | changes))
    return folder


def compile_once(model: Path, options: tuple[str, ...], cache: Path) -> dict[str, float]:
    """Seconds of the process, of its stages, of what is none of them, and of each C++ compiler."""
    place = cache / "artifact"
    command = [sys.executable, "-m", "graphllm.cli", "compile", str(model), *options, "-o", str(place)]
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "GRAPHLLM_CACHE": str(cache)})
    whole = time.perf_counter() - start
    manifest = Artifact.trusted(place).manifest
    stages, compilers = manifest.seconds, manifest.compilers
    rest = {"start, import torch, end": whole - sum(stages.values())}
    return {"whole": whole, **rest, **stages, **{f"g++ {name}": s for name, s in compilers.items()}}


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """By name, over the runs that have it."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: round(statistics.median(run[name] for run in runs if name in run), 2) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--depth", nargs="?", const="qwen2.5-0.5b", metavar="SHAPE")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    made: dict[str, list[dict[str, float]]] = {}
    for run in range(args.runs):
        if args.depth:
            for name, changes in (("4 layers", {"num_hidden_layers": 4}), ("all layers", {})):
                model = shape(folder / name, args.depth, **changes)
                took = compile_once(model, (*DUMMY, *KINDS["first"]), folder / f"{name}.{run}")
                made.setdefault(name, []).append(took)
            continue
        for name, model, load in (("embedded", Path(MODEL_DIR), ()), ("qwen2.5-0.5b", shape(folder / "shape"), DUMMY)):
            cache = folder / f"{name}.{run}"
            for kind, options in KINDS.items():
                made.setdefault(f"{name}, {kind}", []).append(compile_once(model, (*load, *options), cache))
    result = {
        "machine": f"{detect_target('auto').name}, {usable_cores()} cores", "torch": version("torch"),
        "shape": args.depth, "g++": compiler_version(), "runs": args.runs,
        "seconds": {name: medians(runs) for name, runs in made.items()},
    }  # fmt: skip
    if args.depth:
        whole = {name: times["whole"] for name, times in result["seconds"].items()}
        result["ratio"] = round(whole["all layers"] / whole["4 layers"], 3)
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
