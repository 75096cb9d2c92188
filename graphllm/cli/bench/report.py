"""What all benchmarks write: the figures with the machine, versions and command line, as a table and as JSON."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from graphllm.config import ConfigError
from graphllm.config.fields import is_folder
from graphllm.host.machine import detect_target
from graphllm.version import __version__

_SECRET = "--api-key"


def about(target: str = "auto", program: str = "graphllm") -> dict[str, Any]:
    """Where and how a measurement was made. target: the device it used."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = {"name": detect_target("cpu" if target == "cpu" else "auto").name, "cores": len(os.sched_getaffinity(0))}
    versions = {"graphllm": __version__, "python": platform.python_version()}
    for package in ("torch", "triton"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            **machine,
            "memory_gib": round(memory / 2**30, 1),
            "system": platform.platform(),
            "load_average": os.getloadavg()[0],
        },
        "versions": versions,
        "command": shlex.join(_without_secrets([program, *sys.argv[1:]])),
    }


def _without_secrets(arguments: Sequence[str]) -> list[str]:
    shown = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if before == _SECRET:
            argument = "..."
        elif argument.startswith(_SECRET + "="):
            argument = f"{_SECRET}=..."
        shown.append(argument)
    return shown


def check_output(output: Path | None) -> None:
    """Raises ConfigError when the results could not be written in the end."""
    if output is not None and not is_folder(output.absolute().parent):
        raise ConfigError(f"output is {str(output)!r:.80}: there is no such folder; make it first")
    if output is not None and is_folder(output):
        raise ConfigError(f"output is {str(output)!r:.80}: that is a folder; give a file in it")


def write(output: Path | None, result: Mapping[str, Any]) -> None:
    """The results as JSON."""
    if output is not None:
        output.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def show(title: str, rows: Iterable[tuple[str, object]]) -> None:
    """Figures by name on the terminal."""
    table = Table("", "", title=title, title_justify="left", show_header=False)
    table.columns[1].justify = "right"
    for name, value in rows:
        table.add_row(name, number(value))
    Console().print(table)


def show_grid(title: str, headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Rows that have several figures each."""
    table = Table(*headers, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*map(number, row))
    Console().print(table)


def number(value: object) -> str:
    """A figure for people."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.2f}" if abs(value) >= 1 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
