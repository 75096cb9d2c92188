"""bench/results/README.md out of the results: a table for each machine."""

from __future__ import annotations

import json
from typing import Any

from bench.record import RESULTS

PAGE = RESULTS / "README.md"
_DETAILS = ("traced", "kernels of a step", "each turn", "tried", "padding by bucket")  # rows that only the files have
_ROWS, _FIGURES = 48, 8  # of a case with more rows, only their number is shown; figures of a row
_HEAD = """# Results

`python -m bench report` writes this page from the files in this folder; do not edit it. `python -m bench` lists the
cases, and [notes](../notes) say what was tried and why. A file holds the newest run of its case on its machine, with
versions and command; older runs are in git's history. Compare figures of one run only: shared machines change their
speed. To time a change, run `python -m bench paired OTHER` with another checkout. Single runs, kernels and other
details are in the files.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for folder in sorted(p for p in RESULTS.iterdir() if p.is_dir()):
        records = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
        names = sorted({machine_name(r["machine"]) for r in records})
        parts += [f"## {folder.name}", "", "; ".join(names) + ".", "", "| case | row | figures |", "|---|---|---|"]
        parts += [line for r in records for line in lines_of(folder.name, r)]
        parts.append("")
    return "\n".join(parts)


def machine_name(machine: dict[str, Any]) -> str:
    """Its name, cores and GPUs."""
    gpus = f"{machine['gpus']} x " if machine.get("gpus", 1) != 1 else ""
    features = f" with {machine['features']}" if machine.get("features") else ""
    return f"{gpus}{machine['name']}{features}, {machine.get('cores', 'unknown')} cores".replace(", unknown cores", "")


def lines_of(folder: str, record: dict[str, Any]) -> list[str]:
    """The table's lines of a case."""
    link = f"[{record['case']}]({folder}/{record['case']}.json), {record['date']}"
    rows = {name: figures_of(row) for name, row in record["rows"].items() if not any(word in name for word in _DETAILS)}
    shown = {name: figures for name, figures in rows.items() if figures}
    if len(shown) > _ROWS:
        return [f"| {link} | {len(record['rows'])} rows | |"]
    lines = [f"| {{}} | {_cell(name)} | {_cell(figures)} |" for name, figures in shown.items()]
    return [line.format(link if i == 0 else "") for i, line in enumerate(lines)] or [f"| {link} | | |"]


def figures_of(row: dict[str, Any]) -> str:
    """Numbers and short words of a row, without its lists."""
    found = [f"{name} {number(value)}" for name, value in row.items() if _is_shown(value)]
    more = len(found) - _FIGURES
    return "; ".join(found[:_FIGURES]) + (f"; {more} more" if more > 0 else "")


def number(value: float | str) -> str:
    """As few digits as tell it."""
    if isinstance(value, (bool, str)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _is_shown(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, str) and len(value) <= 40)


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("{", "(").replace("}", ")").replace("\n", " ")
