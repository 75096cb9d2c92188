"""Time the implementations of an op over its real cases, for `graphllm op bench` and the case `ops` of bench/.

A call is timed on as many distinct input sets as overflow the caches, back to back: on a GPU as one captured graph,
with replays timed by events (no launch gaps of Python), on a CPU by the wall clock. The median is reported.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from graphllm.host.machine import detect_target
from graphllm.ir.op import CallSite, Op
from graphllm.ir.testing.cases import Case, Maker
from graphllm.ir.testing.check import cases_of, relative_error

_COLD_BYTES = 256 * 2**20  # more than any cache of the chips in question
_MOST_COPIES = 64


@dataclass(frozen=True)
class Timing:
    """One implementation on one case. Bytes and operations are the op's own count. error: relative to the reference in
    float64, None if not checked."""

    op: str
    case: str
    dtype: str
    impl: str
    microseconds: float
    gigabytes_per_second: float
    teraflops: float
    error: float | None = None


def time_op(
    op: Op,
    device: str,
    dtype: str = "bfloat16",
    only: str = "",
    reference: bool = True,
    check: bool = False,
    budget: float = 1.0,
) -> Iterator[Timing]:
    """Every implementation for the device that supports a case, and the reference, on every real case with ``only`` in
    its name. budget: seconds for one of them on a CPU, after which what was measured by then is taken."""
    for case in (c for c in cases_of(op) if c.size == "real" and only in c.name):
        for impl, fn in _implementations(op, case, device, dtype, reference):
            first = inputs_of(op, case, device, dtype)
            cost = op.cost(**first)
            copies = max(1, min(_MOST_COPIES, -(-_COLD_BYTES // max(cost.bytes, 1))))

            more = functools.partial(inputs_of, op, case, device, dtype)
            seconds = (_time_cuda if device == "cuda" else _time_cpu)(fn, first, more, copies, budget)
            error = error_of(op, case, fn, device, dtype) if check else None
            rates = cost.bytes / seconds / 1e9, cost.flops / seconds / 1e12
            yield Timing(op.name, case.name, dtype, impl, seconds * 1e6, *rates, error)


def _implementations(
    op: Op, case: Case, device: str, dtype: str, reference: bool
) -> Iterator[tuple[str, Callable[..., Any]]]:
    target = detect_target("cuda" if device == "cuda" else "cpu")
    site = CallSite(inputs_of(op, case, device, dtype), target, case.bucket)
    for impl in op.impls.values():
        if impl.device == device and impl.supports(site):
            yield impl.name, impl.at(site)
    if reference:
        yield "reference", op.reference


def inputs_of(op: Op, case: Case, device: str, dtype: str, seed: int = 0) -> dict[str, Any]:
    """The case's arguments, drawn on the device; different for every seed."""
    maker = Maker(torch.Generator(device).manual_seed(seed), torch.device(device), getattr(torch, dtype))
    return op.bind((), case.inputs(maker))


Call = Callable[..., Any]
More = Callable[[int], dict[str, Any]]


def _time_cuda(call: Call, first: dict[str, Any], more: More, copies: int, budget: float) -> float:
    sets = [first, *(more(i) for i in range(1, copies))]

    def body() -> None:
        for args in sets:
            call(**args)

    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    measured: list[float] = []
    for _ in range(3):
        graph.replay()
    while len(measured) < 15 or (sum(measured) < budget / 4 and len(measured) < 200):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        measured.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(measured) / copies


def _time_cpu(call: Call, first: dict[str, Any], more: More, copies: int, budget: float) -> float:
    call(**first)  # builds the kernel where there is one
    measured = [_clock(call, first)]
    if measured[0] > budget:
        return measured[0]
    sets = [first, *(more(i) for i in range(1, min(copies, max(1, int(budget / 3 / measured[0])))))]
    measured = []
    while sum(measured) < budget:
        measured += [_clock(call, args) for args in sets]
    return statistics.median(measured)


def _clock(call: Call, args: dict[str, Any]) -> float:
    begin = time.perf_counter()
    call(**args)
    return time.perf_counter() - begin


def error_of(op: Op, case: Case, fn: Callable[..., Any], device: str, dtype: str) -> float:
    """Relative error of one call against the reference in float64; for integers the share that differs."""
    args, exact = inputs_of(op, case, device, dtype), inputs_of(op, case, device, dtype)
    exact = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in exact.items()}
    return relative_error(case.specified(fn(**args), args), case.specified(op.reference(**exact), exact))
