"""Time every implementation of ops over their real cases and compare with the hardware's ceilings.

    python bench/ops.py paged_attention sample --check --json results.json
    python bench/ops.py linear --device cpu --dtype bfloat16 --only T1_ --reference

A call is timed on as many distinct input sets as overflow the caches, back to back: on a GPU as one captured graph
whose replays are timed by events (no launch gaps of Python), on a CPU by the wall clock. The median is reported.
The ceilings are measured rates of one machine, given by options; the share is the time that the op's own count of bytes
and operations would take at the ceilings, over the time taken. --check compares with the reference in float64.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from graphllm.ir.cases import Case, Maker
from graphllm.ir.check import cases_of, relative_error
from graphllm.ir.op import Op, Site
from graphllm.ir.registry import load_ops
from graphllm.machine import detect_target

_COLD_BYTES = 256 * 2**20  # more than any cache of the chips in question
_MOST_COPIES = 64


@dataclass(frozen=True)
class Timing:
    """One implementation on one case. share: of the ceiling that binds. error: against float64, None if not checked."""

    op: str
    case: str
    dtype: str
    impl: str
    microseconds: float
    gigabytes_per_second: float
    teraflops: float
    share: float
    error: float | None


def time_op(
    op: Op, device: str, dtype: str, ceilings: tuple[float, float], only: str, reference: bool, check: bool
) -> Iterator[Timing]:
    """Every implementation for the device on every real case whose name contains ``only``."""
    for case in (c for c in cases_of(op) if c.size == "real" and only in c.name):
        for impl, fn in _implementations(op, case, device, dtype, reference):
            first = inputs_of(op, case, device, dtype)
            cost = op.cost(**first)
            copies = max(1, min(_MOST_COPIES, -(-_COLD_BYTES // max(cost.bytes, 1))))
            sets = [first, *(inputs_of(op, case, device, dtype, i) for i in range(1, copies))]
            seconds = time_calls(lambda args, fn=fn: fn(**args), sets, device)
            error = error_of(op, case, fn, device, dtype) if check else None
            least = max(cost.bytes / ceilings[0], cost.flops / ceilings[1])
            yield Timing(
                op.name, case.name, dtype, impl, seconds * 1e6, cost.bytes / seconds / 1e9, cost.flops / seconds / 1e12,
                least / seconds, error,
            )  # fmt: skip


def _implementations(
    op: Op, case: Case, device: str, dtype: str, reference: bool
) -> Iterator[tuple[str, Callable[..., Any]]]:
    site = Site(inputs_of(op, case, device, dtype), detect_target(device), case.bucket)
    for impl in op.impls.values():
        if impl.device == device and impl.supports(site):
            yield impl.name, impl.fn
    if reference:
        yield "reference", op.reference


def inputs_of(op: Op, case: Case, device: str, dtype: str, seed: int = 0) -> dict[str, Any]:
    """The case's arguments, drawn on the device; different for every seed."""
    maker = Maker(torch.Generator(device).manual_seed(seed), torch.device(device), getattr(torch, dtype))
    return op.bind((), case.inputs(maker))


def time_calls(call: Callable[[dict[str, Any]], Any], sets: list[dict[str, Any]], device: str) -> float:
    """Seconds of one call: the median over repeats of all sets, divided by their number."""
    return (_time_cuda if device == "cuda" else _time_cpu)(lambda: [call(args) for args in sets]) / len(sets)


def _time_cuda(body: Callable[[], Any], least: int = 15, budget: float = 0.25) -> float:
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    measured: list[float] = []
    for _ in range(3):
        graph.replay()
    while len(measured) < least or (sum(measured) < budget and len(measured) < 200):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        measured.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(measured)


def _time_cpu(body: Callable[[], Any], least: int = 3, budget: float = 1.0) -> float:
    body()
    measured: list[float] = []
    while len(measured) < least or sum(measured) < budget:
        begin = time.perf_counter()
        body()
        measured.append(time.perf_counter() - begin)
    return statistics.median(measured)


def error_of(op: Op, case: Case, fn: Callable[..., Any], device: str, dtype: str) -> float:
    """Relative error of one call against the reference in float64; for integers the share that differs."""
    args, exact = inputs_of(op, case, device, dtype), inputs_of(op, case, device, dtype)
    exact = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in exact.items()}
    return relative_error(case.specified(fn(**args), args), case.specified(op.reference(**exact), exact))


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
    ceilings = options.bandwidth * 1e9, options.teraflops * 1e12
    results = []
    print(f"{'case':34}{'implementation':18}{'µs':>10}{'GB/s':>9}{'TFLOP/s':>9}{'share':>8}{'error':>10}")
    for name in options.ops:
        for t in time_op(
            ops[name], options.device, options.dtype, ceilings, options.only, options.reference, options.check
        ):
            results.append(asdict(t))
            error = "" if t.error is None else f"{t.error:.1e}"
            print(
                f"{t.case:34}{t.impl:18}{t.microseconds:10.1f}{t.gigabytes_per_second:9.0f}{t.teraflops:9.1f}"
                f"{t.share:8.0%}{error:>10}",
                flush=True,
            )
    if options.json:
        machine = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor()
        about = {"machine": machine, "torch": torch.__version__, "python": platform.python_version(), "argv": sys.argv}
        with open(options.json, "w") as file:
            json.dump({**about, "ceilings": ceilings, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
