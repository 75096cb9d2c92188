"""Time every implementation of ops over their real cases and compare with the hardware's ceilings.

    python bench/ops.py paged_attention sample --check --json results.json
    python bench/ops.py linear --device cpu --dtype bfloat16 --only T1_ --reference

`graphllm op bench` with more choices; graphllm/ir/testing/bench.py says how a call is timed. The ceilings are measured
rates of one machine, given by options; the share is the time that the op's own count of bytes and operations would
take at the ceilings, over the time taken. --check compares with the reference in float64.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict

import torch

from graphllm.ir.registry import load_ops
from graphllm.ir.testing.bench import time_op


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="+", help="names of ops")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", default="", help="a part of the case names to run")
    parser.add_argument("--reference", action="store_true", help="time the reference body as well")
    parser.add_argument("--check", action="store_true", help="compare with the reference in float64")
    parser.add_argument("--bandwidth", type=float, default=4270, help="ceiling in GB/s")
    parser.add_argument("--teraflops", type=float, default=788, help="ceiling in TFLOP/s")
    parser.add_argument("--json", help="where to write the results")
    options = parser.parse_args()
    ops = load_ops()
    results = []
    print(f"{'case':34}{'implementation':18}{'µs':>10}{'GB/s':>9}{'TFLOP/s':>9}{'share':>8}{'error':>10}")
    for name in options.ops:
        for t in time_op(ops[name], options.device, options.dtype, options.only, options.reference, options.check):
            share = max(t.gigabytes_per_second / options.bandwidth, t.teraflops / options.teraflops)
            results.append({**asdict(t), "share": share})
            error = "" if t.error is None else f"{t.error:.1e}"
            print(
                f"{t.case:34}{t.impl:18}{t.microseconds:10.1f}{t.gigabytes_per_second:9.0f}{t.teraflops:9.1f}"
                f"{share:8.0%}{error:>10}",
                flush=True,
            )
    if options.json:
        machine = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor()
        about = {"machine": machine, "torch": torch.__version__, "python": platform.python_version(), "argv": sys.argv}
        ceilings = options.bandwidth * 1e9, options.teraflops * 1e12
        with open(options.json, "w") as file:
            json.dump({**about, "ceilings": ceilings, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
