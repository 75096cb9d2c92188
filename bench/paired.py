"""One tree of graphllm beside another on one machine: both loaded at once, asked in turn, row by row.

    python bench/paired.py OTHER [--shape qwen3-0.6b] [--rounds 5] [--rows decode-1,decode-64,mixed,start] [--out FILE]

OTHER is the root of another checkout (`git archive REV | tar x`). Random weights, greedy, through `LLM.generate`; one
round warms up and does not count. decode-N: ms a step of N requests, 128 tokens in. ttft-N: ms to the token behind a
prompt of N. prefill-NxM: tokens/s of N prompts of M tokens. mixed-N: output tokens/s of N (else 1,000) requests of 100
to 1,024 tokens in and out, in every second round. start: seconds from the start of a process to its first token.
compile: seconds from nothing, once. A ratio is this tree's figure by the other's in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
UP = ("prefill", "mixed")  # rows where more is better

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("other", type=Path, nargs="?")
parser.add_argument("--shape", default="qwen3-0.6b")
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--rows", default="decode-1,decode-64,decode-256,ttft-8192,prefill-32x1024,mixed,start")
parser.add_argument("--options", default="{}", help="of EngineArgs, as JSON")
parser.add_argument("--steps", type=int, default=256, help="of a decode row")
parser.add_argument("--out", type=Path)
parser.add_argument("--worker", nargs=3, metavar=("FOLDER", "OPTIONS", "STEPS"), help=argparse.SUPPRESS)


def worker(folder: str, options: dict[str, Any], steps: int) -> None:
    """Answer rows from stdin with figures. Knows nothing of graphllm but `LLM`, which all trees have."""
    from graphllm import LLM, SamplingParams

    llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False, **options)
    rng = random.Random(0)

    def run(lengths: list[tuple[int, int]]) -> float:
        prompts = [{"prompt_token_ids": [rng.randrange(1000) for _ in range(n)]} for n, _ in lengths]
        params = [SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True) for _, out in lengths]
        begin = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - begin

    run([(128, 1)])
    print("ready", flush=True)
    for line in sys.stdin:
        kind, _, size = line.strip().partition("-")
        if kind == "decode":
            few, many = (run([(128, 1 + n)] * int(size)) for n in (0, steps))
            print(1e3 * (many - few) / steps, flush=True)
        elif kind == "ttft":
            print(1e3 * run([(int(size), 1)]), flush=True)
        elif kind == "prefill":
            count, length = map(int, size.split("x"))
            print(count * length / run([(length, 1)] * count), flush=True)
        else:
            sizes = random.Random(1)
            lengths = [(sizes.randint(100, 1024), sizes.randint(100, 1024)) for _ in range(int(size or 1000))]
            print(sum(out for _, out in lengths) / run(lengths), flush=True)


class Tree:
    """A checkout: its compiled artifact and a process that has it loaded."""

    def __init__(self, root: Path, folder: Path, args: argparse.Namespace, cache: Path) -> None:
        self.environment = {**os.environ, "PYTHONPATH": str(root), "GRAPHLLM_CACHE": str(cache)}
        # Packages that only PYTHONPATH names stay behind the tree.
        if also := os.environ.get("PYTHONPATH"):
            self.environment["PYTHONPATH"] += os.pathsep + also
        self.command = [sys.executable, __file__, "--worker", str(folder), args.options, str(args.steps)]
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


def ratios(values: dict[str, list[float]]) -> list[float]:
    """This tree's figure by the other's, round by round."""
    return [round(a / b, 4) for a, b in zip(values["this"], values["other"], strict=True)]


def main() -> None:
    args = parser.parse_args()
    if args.worker:
        folder, options, steps = args.worker
        worker(folder, json.loads(options), int(steps))
        return
    sys.path.append(str(ROOT))
    import gpu_step

    from bench import real_size

    shape = {**real_size.SHAPES, **gpu_step.SHAPES}[args.shape]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(shape))
        trees = {
            name: Tree(root.resolve(), folder, args, Path(place) / name)
            for name, root in (("other", args.other), ("this", ROOT))
        }
        rows = args.rows.split(",")
        found: dict[str, dict[str, list[float]]] = {row: {name: [] for name in trees} for row in rows}
        result: dict[str, Any] = {
            "command": " ".join(sys.argv), "versions": {"torch": version("torch")}, "shape": args.shape,
            "seconds to the first token with nothing compiled": {n: round(t.first_s, 1) for n, t in trees.items()},
            "rows": {},
        }  # fmt: skip
        for turn in range(args.rounds + 1):
            for row in rows:
                if row.startswith("mixed") and turn % 2 == 0:
                    continue
                for name in random.sample(sorted(trees), 2):
                    value = trees[name].ask(row)
                    if turn:
                        found[row][name].append(round(value, 4))
            if turn and args.out:  # after every round: a lease may end before the last
                result["rows"] = {row: {**values, "ratios": ratios(values)} for row, values in found.items()}
                args.out.write_text(json.dumps(result, indent=1))
        for row, values in found.items():
            better = "more is better" if row.startswith(UP) else "less is better"
            middle = {name: round(statistics.median(v), 3) for name, v in values.items()}
            each = ratios(values)
            spread = f"{min(each):.3f} to {max(each):.3f}"
            print(f"{row}: {middle}, ratio {statistics.median(each):.3f} ({spread}), {better}")
        print(result["seconds to the first token with nothing compiled"])
        for tree in trees.values():
            tree.close(tree.process)


if __name__ == "__main__":
    main()
