"""Two trees of graphllm on one machine: both are loaded at once and asked in turn, row by row.

    python -m bench paired OTHER [--shape qwen3-0.6b] [--rounds 5] [--rows decode-1,decode-64,mixed,start]

OTHER is the root of another checkout (`git archive REV | tar x`). Random weights, greedy, through `LLM.generate`; one
round warms up and does not count. decode-N: ms a step of N requests, 128 tokens in. ttft-N: ms to the first token of a
prompt of N. prefill-NxM: tokens/s of N prompts of M tokens. mixed-N: output tokens/s of N (else 1,000) requests of 100
to 1,024 tokens in and out, in every second round. start: seconds from the start of a process to its first token.
compile: seconds from nothing, once. A ratio is this tree's figure by the other's in the same round.
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.harness import ROOT, Case
from bench.models import write_config

CASES = [
    (
        "paired",
        {
            "other": Path, "shape": "qwen3-0.6b", "rounds": 5,
            "rows": ("decode-1", "decode-64", "decode-256", "ttft-8192", "prefill-32x1024", "mixed", "start"),
            "options": "{}", "steps": 256, "target": "cuda",
        },
    ),
]  # fmt: skip
HELP = {
    "other": "root of the other checkout",
    "options": "settings of EngineArgs, as JSON",
    "steps": "steps of a decode row",
    "target": "cuda or cpu; on cuda each tree has a cache of 24 GiB",
}
UP = ("prefill", "mixed")  # rows where more is better
_ROWS = r"decode-\d+|ttft-\d+|prefill-\d+x\d+|mixed(-\d+)?|start"
_CACHE = 24 << 30  # bytes: both trees are loaded at once, and a share of the memory counts what others use


class Tree:
    """A checkout: its compiled artifact and a process that has it loaded."""

    def __init__(self, root: Path, folder: Path, case: Case, cache: Path) -> None:
        caches = {"GRAPHLLM_CACHE": cache, "TRITON_CACHE_DIR": cache / "triton",
                  "TORCHINDUCTOR_CACHE_DIR": cache / "inductor"}  # fmt: skip
        self.environment = {**os.environ, "PYTHONPATH": str(root), **{name: str(at) for name, at in caches.items()}}
        # Packages that only PYTHONPATH names come after the tree.
        if also := os.environ.get("PYTHONPATH"):
            self.environment["PYTHONPATH"] += os.pathsep + also
        program = ROOT / "bench" / "paired_worker.py"
        shared = {"kv_cache_memory_bytes": _CACHE} if case.target == "cuda" else {}
        options = json.dumps({**shared, **json.loads(case.options)})
        self.command = [sys.executable, str(program), str(folder), options, str(case.steps)]
        begin = time.perf_counter()
        self.close(self.open())  # compiles
        self.first_s = time.perf_counter() - begin
        self.process = self.open()

    def open(self) -> subprocess.Popen[str]:
        made = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.environment, cwd="/"
        )
        assert made.stdout is not None
        if made.stdout.readline().strip() != "ready":
            raise SystemExit(f"{self.environment['PYTHONPATH']}: does not start; its words are above")
        return made

    def close(self, process: subprocess.Popen[str]) -> None:
        process.communicate()

    def ask(self, row: str) -> float:
        """A row's figure."""
        if row == "start":
            begin = time.perf_counter()
            process = self.open()
            seconds = time.perf_counter() - begin
            self.close(process)
            return seconds
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{row}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def run(case: Case) -> Iterator[dict[str, Any]]:
    """Every row after each round: a lease may end before the last."""
    if unknown := [row for row in case.rows if not re.fullmatch(_ROWS, row)]:
        raise SystemExit(f"rows: {', '.join(unknown)} is no row; the first lines of {__file__} list them")
    with tempfile.TemporaryDirectory() as place:
        folder = write_config(Path(place) / "model", case.shape)
        trees = {
            name: Tree(root.resolve(), folder, case, Path(place) / name)
            for name, root in (("other", case.other), ("this", ROOT))
        }
        found: dict[str, dict[str, list[float]]] = {row: {name: [] for name in trees} for row in case.rows}
        yield {"compile": {f"{name} s": round(tree.first_s, 1) for name, tree in trees.items()}}
        for turn in range(case.rounds + 1):
            for row in case.rows:
                if row.startswith("mixed") and turn % 2 == 0:
                    continue
                for name in random.sample(sorted(trees), 2):
                    value = trees[name].ask(row)
                    if turn:
                        found[row][name].append(round(value, 4))
            if turn:
                yield {row: described(row, values) for row, values in found.items() if values["this"]}
        for row, values in found.items():
            print(f"{row}: {described(row, values)}")
        for tree in trees.values():
            tree.close(tree.process)


def described(row: str, values: dict[str, list[float]]) -> dict[str, Any]:
    """Medians of both trees, and the ratio: its median, least and most, and all rounds."""
    ratios = [round(a / b, 4) for a, b in zip(values["this"], values["other"], strict=True)]
    medians = {f"{name}, median": round(statistics.median(v), 3) for name, v in values.items()} if ratios else {}
    spread = {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)} if ratios else {}
    better = "more" if row.startswith(UP) else "less"
    return {**medians, **spread, "better": better, **values, "ratios": ratios}
