"""Tables of where the suite's time goes, by file and by cause, from what the last run recorded (`tests/recording.py`).

`python tests/times.py` prints them. `--save TIER` also puts them into docs/testing.md, and the seconds of each file
into tests/durations.json, by which workers take the longest first.
"""

from __future__ import annotations

import argparse
import collections
import json
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "test-times"  # a file of each process of the last run
DURATIONS = Path(__file__).with_name("durations.json")
PAGE = ROOT / "docs" / "testing.md"
LINES = 25  # of a table


class Row(NamedTuple):
    """Of some tests: how many, worker seconds, and seconds by cause."""

    tests: int
    seconds: float
    causes: collections.Counter[str]


def recorded() -> Iterator[tuple[str, float, dict[str, float]]]:
    """Name, seconds, and seconds by cause of each test."""
    for file in sorted(FOLDER.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            test = json.loads(line)
            yield test["test"], test["seconds"], test["causes"]


def unit_of(nodeid: str) -> str:
    """What one worker runs as a whole: a file, or of tests/ops/test_ops.py one op, as ops have nothing in common."""
    file, _, test = nodeid.partition("::")
    if file.endswith("/test_ops.py"):
        return f"{file}:{test.partition('[')[2].partition('-')[0].rstrip(']')}"
    return file


def by_file() -> dict[str, Row]:
    """A row for each file, the longest first."""
    found: dict[str, Row] = {}
    for name, seconds, causes in recorded():
        file = name.partition("::")[0]
        row = found.get(file, Row(0, 0.0, collections.Counter()))
        row.causes.update(causes)
        found[file] = Row(row.tests + 1, row.seconds + seconds, row.causes)
    return dict(sorted(found.items(), key=lambda item: -item[1].seconds))


def tables(title: str) -> str:
    """Markdown."""
    files = by_file()
    total, causes = sum(row.seconds for row in files.values()), collections.Counter[str]()
    for row in files.values():
        causes.update(row.causes)
    names = [name for name, _ in causes.most_common()]
    head = ["file", "tests", "s", *names]
    rows = [["all", sum(r.tests for r in files.values()), round(total), *(round(causes[n]) for n in names)]]
    for file, row in list(files.items())[:LINES]:
        cells = [round(row.causes[n], 1) or "" for n in names]
        rows.append([file.removeprefix("tests/"), row.tests, round(row.seconds, 1), *cells])
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, ["---"] * len(head), *rows)]
    return f"{title}\n\n" + "\n".join(lines) + "\n"


def _processor() -> str:
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    flags = Path("/proc/cpuinfo").read_text()
    has = [name for name in ("avx2", "avx512f", "amx_tile") if f" {name}" in flags]
    return f"{found[1] if found else platform.processor()} ({', '.join(has)})"


def save(tier: str) -> None:
    """Write the tables into the page and the durations into their file."""
    durations = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    units: collections.Counter[str] = collections.Counter()
    for name, seconds, _ in recorded():
        units[unit_of(name)] += seconds
    durations[tier] = {unit: round(seconds, 1) for unit, seconds in sorted(units.items())}
    DURATIONS.write_text(json.dumps(durations, indent=1, sort_keys=True) + "\n")
    text, mark = PAGE.read_text(), f"<!-- times of {tier} -->"
    before, _, rest = text.partition(mark)
    after = rest.partition("<!-- end -->")[2]
    title = f"`make {tier}` on {_processor()}, seconds of workers:"
    PAGE.write_text(f"{before}{mark}\n{tables(title)}<!-- end -->{after}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", metavar="TIER", choices=("test", "test-all"))
    asked = parser.parse_args()
    if not any(FOLDER.glob("*.jsonl")):
        sys.exit(f"nothing is recorded in {FOLDER}; run `make test` or `make test-all` first")
    if asked.save:
        save(asked.save)
    print(tables(f"On {_processor()}, seconds of workers:"))
