"""Start to first token of a fresh process from its artifact, beside its floor: import torch, read weights, prefill.

    python bench/startup.py CHECKPOINT ARTIFACT [--runs N] [--out FILE.json]

Each run is a new `graphllm run` process without a compiler on PATH. The floor is measured in turn with it, in fresh
processes too: importing torch, then reading every byte of the weights into fresh memory; the prefill is a warm one.
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
from pathlib import Path

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
import json, sys, time
from pathlib import Path
from graphllm import artifact, prepare
place = Path(sys.argv[2])
engine = prepare.load_engine(prepare.open_source(sys.argv[1]), place, artifact.verify(place))
from graphllm.engine.params import SamplingParams
seconds = []
for _ in range(5):
    engine.add([0] * 16, SamplingParams(max_tokens=1, temperature=0.0))
    start = time.perf_counter()
    list(engine.run())
    seconds.append(time.perf_counter() - start)
print(min(seconds))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    files = [str(f) for f in sorted(args.checkpoint.glob("*.safetensors"))]
    prompt = Path(tempfile.mkdtemp()) / "prompt.txt"
    prompt.write_text(" ".join(["a"] * 16))
    command = [sys.executable, "-m", "graphllm.cli", "run", str(prompt), "--raw", "--model", str(args.checkpoint),
               "--artifact", str(args.artifact), "--max-tokens", "1", "--temperature", "0"]  # fmt: skip
    bare = {**os.environ, "PATH": "/nonexistent"}
    starts, imports, reads = [], [], []
    phases = ""
    for i in range(args.runs + 1):
        begin = time.perf_counter()
        done = subprocess.run(command, env=bare, capture_output=True, text=True, check=True)
        total = time.perf_counter() - begin
        phases = done.stderr.strip().splitlines()[-1]
        floor = subprocess.run([sys.executable, "-c", FLOOR, *files], capture_output=True, text=True, check=True)
        if i:  # the first warms the page cache
            starts.append(total)
            imports.append(float(floor.stdout.split()[0]))
            reads.append(float(floor.stdout.split()[1]))
    warm = subprocess.run(
        [sys.executable, "-c", PREFILL, str(args.checkpoint), str(args.artifact)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    prefill = float(warm.stdout.split()[-1])
    floors = [a + b + prefill for a, b in zip(imports, reads, strict=True)]
    result = {
        "whole process s": round(statistics.median(starts), 3),
        "floor s": round(statistics.median(floors), 3),
        "floor parts s": {"import torch": round(statistics.median(imports), 3), "read weights":
                          round(statistics.median(reads), 3), "prefill": round(prefill, 3)},
        "ratio": round(statistics.median(a / b for a, b in zip(starts, floors, strict=True)), 3),
        "last run's phases": phases,
        "runs": args.runs,
    }  # fmt: skip
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
