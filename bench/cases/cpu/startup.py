"""Start to first token of a fresh process from its artifact, and its floor: import torch, read weights, prefill.

    python -m bench startup CHECKPOINT ARTIFACT [ARTIFACT ...] [--runs N]

Each run is a new `graphllm run` process without a compiler on PATH; several artifacts take turns, such as one with and
one without baked weights. The floor is measured in turn with them, in fresh processes too: importing torch, then
reading every byte of the weights into fresh memory; the prefill is a warm one.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness import GRAPHLLM, Case

CASES = [("startup", {"checkpoint": Path, "artifacts": [Path], "runs": 7})]
HELP = {"checkpoint": "folder of the model", "artifacts": "compiled folders of it, the first one for the prefill"}
FLOOR = """
import sys, time
start = time.perf_counter()
import torch
imported = time.perf_counter()
for name in sys.argv[1:]:
    with open(name, "rb", buffering=0) as file:
        size = file.seek(0, 2)
        file.seek(0)
        memory = memoryview(torch.empty(size, dtype=torch.uint8).numpy())
        done = 0
        while done < size:
            done += file.readinto(memory[done : done + (1 << 24)])
print(imported - start, time.perf_counter() - imported)
"""
PREFILL = """
import sys, time
from graphllm import LLM, SamplingParams
llm = LLM(sys.argv[1], artifact=sys.argv[2], enable_prefix_caching=False)
seconds = []
for _ in range(5):
    start = time.perf_counter()
    llm.generate([[0] * 16], SamplingParams(max_tokens=1, temperature=0.0))
    seconds.append(time.perf_counter() - start)
print(min(seconds))
"""


PHASE = re.compile(r"([a-z ]+) (\d+\.\d+)")


class Start(NamedTuple):
    """One process. Seconds from its start to its first output and to its end, and what it says of itself."""

    first_token: float
    whole: float
    phases: dict[str, float]


def start(command: list[str]) -> Start:
    """Run it without a compiler on PATH."""
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        bare = {**os.environ, "PATH": "/nonexistent", "COLUMNS": "1000"}
        process = subprocess.Popen(command, env=bare, stdout=subprocess.PIPE, stderr=errors)
        assert process.stdout is not None
        process.stdout.read(1)
        first = time.perf_counter() - begin
        process.stdout.read()
        status = process.wait()
        whole = time.perf_counter() - begin
        errors.seek(0)
        printed = errors.read()
    if status:
        raise RuntimeError(printed)
    phases = {name.strip(): float(seconds) for name, seconds in PHASE.findall(printed.partition("start-up, s:")[2])}
    return Start(first, whole, phases)


def median(starts: list[Start]) -> dict[str, Any]:
    """Of each figure. outside: the interpreter, its imports and, in whole, its end."""
    phases = {n: statistics.median(s.phases[n] for s in starts) for n in starts[0].phases}
    first = statistics.median(s.first_token for s in starts)
    return {
        "first token s": round(first, 3),
        "whole process s": round(statistics.median(s.whole for s in starts), 3),
        "its own account s": {n: round(v, 3) for n, v in phases.items()},
        "before that s": round(statistics.median(s.first_token - s.phases["first token"] for s in starts), 3),
        "runs, first token s": [round(s.first_token, 3) for s in starts],
    }


def run(case: Case) -> dict[str, Any]:
    """A row for each artifact, and the parts of the floor."""
    files = [str(f) for f in sorted(case.checkpoint.glob("*.safetensors"))]
    prompt = Path(tempfile.mkdtemp()) / "prompt.txt"
    prompt.write_text("a" * 16)
    command = [*GRAPHLLM, "run", str(prompt), "--raw", "--model", str(case.checkpoint),
               "--max-tokens", "1", "--temperature", "0", "--artifact"]  # fmt: skip
    starts: dict[Path, list[Start]] = {artifact: [] for artifact in case.artifacts}
    imports, reads = [], []
    for i in range(case.runs + 1):
        for artifact, found in starts.items():
            once = start([*command, str(artifact)])
            if i:  # the first warms the page cache
                found.append(once)
        floor = subprocess.run([sys.executable, "-c", FLOOR, *files], capture_output=True, text=True, check=True)
        if i:
            imports.append(float(floor.stdout.split()[0]))
            reads.append(float(floor.stdout.split()[1]))
    warm = subprocess.run(
        [sys.executable, "-c", PREFILL, str(case.checkpoint), str(case.artifacts[0])],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    prefill = float(warm.stdout.split()[-1])
    floor_s = {"import torch": statistics.median(imports), "read weights": statistics.median(reads), "prefill": prefill}
    rows = {artifact.name: median(found) for artifact, found in starts.items()}
    return {**rows, "floor parts s": {name: round(seconds, 3) for name, seconds in floor_s.items()}}
