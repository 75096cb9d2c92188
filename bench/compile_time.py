"""Compile time against depth: the same widths with 4 and with 24 layers, in turn, each in a fresh process.

    python bench/compile_time.py [--runs N] [--out FILE.json]

Prints the medians and their ratio; compile work should not grow with the number of layers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from real_size import SHAPES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    seconds: dict[int, list[float]] = {4: [], 24: []}
    for _ in range(args.runs):
        for layers, times in seconds.items():
            model = folder / str(layers)
            model.mkdir(exist_ok=True)
            (model / "config.json").write_text(json.dumps(SHAPES["qwen2.5-0.5b"] | {"num_hidden_layers": layers}))
            command = [sys.executable, "-m", "graphllm.cli", "compile", str(model), "--load-format", "dummy",
                       "--max-model-len", "2048", "-o", str(model / "artifact")]  # fmt: skip
            start = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            times.append(time.perf_counter() - start)
    medians = {layers: round(statistics.median(times), 2) for layers, times in seconds.items()}
    result = {"compile s by layers": medians, "ratio": round(medians[24] / medians[4], 3), "runs": args.runs}
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
