"""Where the seconds of `graphllm compile` go on a CPU, for the embedded model and for the Qwen2.5-0.5B shape.

    python -m bench compile_time [--runs N]
    python -m bench compile_depth [--shape SHAPE]

Each compile is a process of its own; the models take turns. "first": with an empty cache, "again": after it, with
another --max-model-len, "int8" and "int4": the same after it. Figures are medians of the whole process and of its
stages; the rows "g++" run at the same time as them. compile_depth: one shape, with 4 layers and with all of its own,
and their ratio. On a machine with a GPU, it is compiled for the GPU.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.harness import GRAPHLLM, Case
from bench.models import write_config
from graphllm.embedded import MODEL_DIR
from graphllm.host.machine import compiler_version
from graphllm.program.artifact import Artifact

CASES = [("compile_time", {"runs": 3}), ("compile_depth", {"runs": 3, "shape": "qwen2.5-0.5b"})]
DUMMY = ("--load-format", "dummy")
KINDS: dict[str, tuple[str, ...]] = {
    "first": ("--max-model-len", "512"),
    "again": ("--max-model-len", "384"),
    "int8": ("--max-model-len", "512", "--quantization", "int8"),
    "int4": ("--max-model-len", "512", "--quantization", "int4"),
}


def compile_once(model: Path, options: tuple[str, ...], cache: Path) -> dict[str, float]:
    """Seconds of the process, of its stages, of what is none of them, and of each C++ compiler."""
    place = cache / "artifact"
    command = [*GRAPHLLM, "compile", str(model), *options, "-o", str(place)]
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


def run(case: Case) -> dict[str, Any]:
    """Medians by model and kind."""
    folder = Path(tempfile.mkdtemp())
    made: dict[str, list[dict[str, float]]] = {}
    for run in range(case.runs):
        if case.case == "compile_depth":
            for name, changes in (("4 layers", {"num_hidden_layers": 4}), ("all layers", {})):
                model = write_config(folder / name, case.shape, **changes)
                took = compile_once(model, (*DUMMY, *KINDS["first"]), folder / f"{name}.{run}")
                made.setdefault(name, []).append(took)
            continue
        shape = write_config(folder / "shape", "qwen2.5-0.5b")
        for name, model, load in (("embedded", Path(MODEL_DIR), ()), ("qwen2.5-0.5b", shape, DUMMY)):
            cache = folder / f"{name}.{run}"
            for kind, options in KINDS.items():
                made.setdefault(f"{name}, {kind}", []).append(compile_once(model, (*load, *options), cache))
    result: dict[str, Any] = {"g++": compiler_version(), **{name: medians(runs) for name, runs in made.items()}}
    if case.case == "compile_depth":
        result["ratio"] = round(result["all layers"]["whole"] / result["4 layers"]["whole"], 3)
    return result
