"""`graphllm op`: list the registered ops, check them against their specification, time their implementations."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphllm.cli.bench.report import check_output
from graphllm.config import ConfigError
from graphllm.host.machine import detect_target
from graphllm.ir.op import Op
from graphllm.ir.registry import load_ops
from graphllm.ir.testing.bench import time_op
from graphllm.ir.testing.check import cases_of, check_op

_SHOWN_PROBLEMS = 20


def list_ops() -> None:
    """Every op with the first line of its documentation, its facts, implementations and number of cases."""
    table = Table()
    for header in ("op", "facts", "implementations", "cases"):
        table.add_column(header, no_wrap=True)
    table.add_column("computes")  # gives way where the terminal is narrow
    for op in load_ops().values():
        first = (op.__doc__ or "").strip().split("\n")[0]
        impls = "\n".join(f"{i.name} ({i.device})" for i in op.impls.values()) or "reference only"
        computes = Text(first, no_wrap=True, overflow="ellipsis")
        table.add_row(op.name, _facts(op), impls, str(len(cases_of(op))), computes)
    Console().print(table)


def _facts(op: Op) -> str:
    facts = [name for name in ("boundary", "collective", "rowwise") if getattr(op, name)]
    return "\n".join([*facts, *(f"writes {name}" for name in op.mutates)])


def test_ops(name: str | None) -> bool:
    """Run every check of one op, or of all, that this machine can run; whether all passed."""
    console = Console()
    table = Table("op", "implementation", "checks", "failed", "largest error / tolerance", "s")
    problems: list[str] = []
    for op in _chosen(name).values():
        begin = time.perf_counter()
        results = check_op(op.name)
        seconds = f"{time.perf_counter() - begin:.1f}"
        for subject in ("specification", *op.impls):
            own = [r for r in results if r.subject == subject]
            failed = [str(r) for r in own if not r.ok]
            share = max((r.error / r.tolerance for r in own if r.tolerance), default=0.0)
            shown = (str(len(own)), str(len(failed)), f"{share:.2f}") if own else ("not run here", "", "")
            table.add_row(op.name, subject, *shown, seconds if subject == "specification" else "")
            problems += failed
    console.print(table)
    for problem in problems[:_SHOWN_PROBLEMS]:
        console.print(problem, style="red", markup=False, highlight=False)
    if len(problems) > _SHOWN_PROBLEMS:
        console.print(f"and {len(problems) - _SHOWN_PROBLEMS} more")
    return not problems


def _chosen(name: str | None) -> Mapping[str, Op]:
    ops = load_ops()
    if name is not None and name not in ops:
        raise ConfigError(f"op: {name!r} is not registered; there are {', '.join(ops)}")
    return {name: ops[name]} if name is not None else ops


def bench_ops(name: str | None, output: Path | None) -> None:
    """Time one op, or all, on this machine's GPU or else its CPU, on the real cases; ``output``: write JSON there."""
    check_output(output)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    console = Console()
    rows = []
    for op in _chosen(name).values():
        table = Table("case", "implementation", "µs", "GB/s", "GFLOP/s", title=f"{op.name}, bfloat16, {device}")
        # References of boundary ops read data on the host, which a CUDA graph cannot hold.
        for timing in time_op(op, device, reference=device == "cpu" or not op.boundary):
            rows.append(asdict(timing))
            numbers = (timing.microseconds, timing.gigabytes_per_second, 1e3 * timing.teraflops)
            table.add_row(timing.case, timing.impl, *(f"{n:.1f}" for n in numbers))
        console.print(table)
    if output:
        machine = torch.cuda.get_device_name() if device == "cuda" else detect_target("cpu").name
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        about = {"machine": machine, **versions, "threads": torch.get_num_threads()}
        output.write_text(json.dumps({**about, "results": rows}, indent=1))
