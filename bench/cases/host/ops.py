"""Time every implementation of ops over their real cases and compare with the hardware's ceilings.

    python -m bench ops paged_attention sample --check --out results.json
    python -m bench ops linear --target cpu --dtype bfloat16 --only T1_ --reference

`graphllm op bench` with more choices; graphllm/ir/testing/bench.py says how a call is timed. The ceilings are measured
rates of one machine, given by options; the share is the time that the op's own count of bytes and operations would
take at the ceilings, over the time taken. --check compares with the reference in float64.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bench.harness import Case
from graphllm.ir.registry import load_ops
from graphllm.ir.testing.bench import time_op

CASES = [
    (
        "ops",
        {
            "ops": [str], "target": "cuda", "dtype": "bfloat16", "only": "", "reference": False, "check": False,
            "bandwidth": 4270.0, "teraflops": 788.0,
        },
    ),
]  # fmt: skip
HELP = {
    "ops": "names of ops",
    "target": "cuda or cpu",
    "only": "a part of the names of cases to run",
    "reference": "time the reference body as well",
    "check": "compare with the reference in float64",
    "bandwidth": "ceiling in GB/s",
    "teraflops": "ceiling in TFLOP/s",
}


def run(case: Case) -> dict[str, Any]:
    """A row for each case and implementation."""
    ops = load_ops()
    found: dict[str, Any] = {"ceilings": {"GB/s": case.bandwidth, "TFLOP/s": case.teraflops}}
    print(f"{'case':34}{'implementation':18}{'µs':>10}{'GB/s':>9}{'TFLOP/s':>9}{'share':>8}{'error':>10}")
    for name in case.ops:
        for t in time_op(ops[name], case.target, case.dtype, case.only, case.reference, case.check):
            share = max(t.gigabytes_per_second / case.bandwidth, t.teraflops / case.teraflops)
            found[f"{name}, {t.case}, {t.impl}"] = {**asdict(t), "share": share}
            error = "" if t.error is None else f"{t.error:.1e}"
            print(
                f"{t.case:34}{t.impl:18}{t.microseconds:10.1f}{t.gigabytes_per_second:9.0f}{t.teraflops:9.1f}"
                f"{share:8.0%}{error:>10}",
                flush=True,
            )
    return found
