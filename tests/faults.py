"""Does the suite find faults? Forty small ones, each put into a copy of this repository, before its tests run there.

`python tests/faults.py run [--tier test|all] [NUMBER ...]`: for each fault, the test files of a tier whose imports
reach the changed file, the nearest first, up to the first failure. "all" runs what `make test` missed. Results go to
build/faults.json as they come, so that a run that was stopped goes on where it was; `show` prints them.

`python tests/faults.py draw SEED ...` proposes faults: a folder, a file in it by its size, a place in it, all by
chance. Half of the table, tests/faults.toml, was drawn that way. One is left out only where it changes nothing
that can be observed on a CPU; the table says why.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.reach import Graph  # noqa: E402

RESULTS = ROOT / "build" / "faults.json"
COPY = ROOT / "build" / "faulty"


class Fault(NamedTuple):
    """file: of the repository. right, wrong: its text, that stands there once, and what it becomes. what: in words.
    seed: of `draw`, for a drawn one."""

    file: str
    right: str
    wrong: str
    what: str
    seed: int | None = None

    def apply(self, root: Path) -> None:
        """Write it into the repository at ``root``."""
        path = root / self.file
        text = path.read_text()
        assert text.count(self.right) == 1, f"{self.file} has {text.count(self.right)} times {self.right!r}"
        path.write_text(text.replace(self.right, self.wrong))


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
FAULTS = tuple(Fault(**row) for row in _TABLE["fault"])
SKIPPED = {int(seed): why for seed, why in _TABLE["skipped"].items()}


# ---- drawing ----

_NOT_HERE = re.compile(r"gluon|cuda|cubin|embedded/|vendor/|symmetric_memory|ray_nodes|/__init__\.py|_trial|stub_")
_SWAPS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*",
    ast.Div: "*", ast.Mod: "//", ast.And: "or", ast.Or: "and",
}  # fmt: skip
_CPP_SWAPS = {
    " < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " + ": " - ", " - ": " + ", " * ": " + ",
    " += ": " -= ",
    " && ": " || ", " || ": " && ", " == ": " != ", " != ": " == ",
}  # fmt: skip


def draw(seed: int) -> Fault:
    """A fault by chance, the same for the same seed and sources."""
    chance = random.Random(seed)
    folders: dict[str, list[Path]] = {}
    for top in ("graphllm", "ops", "passes", "model_defs"):
        for path in sorted((ROOT / top).rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            if path.suffix not in (".py", ".cpp", ".h", ".js") or _NOT_HERE.search(name) or path.is_symlink():
                continue
            if top == "graphllm" and name.split("/")[1] in ("ops", "passes", "model_defs"):
                continue
            folders.setdefault("/".join(name.split("/")[: 2 if top == "graphllm" else 1]), []).append(path)
    folders["graphllm"] = [p for f in [f for f in folders if f.endswith(".py")] for p in folders.pop(f)]
    while True:
        files = folders[chance.choice(sorted(folders))]
        path = chance.choices(files, [p.stat().st_size for p in files])[0]
        text = path.read_text()
        places = list(_places(text) if path.suffix == ".py" else _cpp_places(text))
        if not places:
            continue
        start, end, wrong = chance.choice(places)
        first, last = start, end  # widened until it stands there once
        while text.count(text[first:last]) != 1:
            first, last = max(0, first - 1), min(len(text), last + 1)
        first, last = text.rfind("\n", 0, first) + 1, (text.find("\n", last) + len(text) + 1) % (len(text) + 1)
        right = text[first:last]
        if text.count(right) != 1 or right.count("\n") > 3:
            continue
        return Fault(
            path.relative_to(ROOT).as_posix(), right, text[first:start] + wrong + text[end:last], "drawn", seed
        )


def _places(text: str) -> Iterator[tuple[int, int, str]]:
    """Of Python: start and end of what may change, and what it becomes."""
    tree = ast.parse(text)
    lines = [0, *(m.end() for m in re.finditer("\n", text))]

    def at(line: int, column: int) -> int:
        return lines[line - 1] + len(text[lines[line - 1] :].encode()[:column].decode(errors="ignore"))

    def between(left: ast.expr, right: ast.expr, wrong: str) -> Iterator[tuple[int, int, str]]:
        a, b = at(left.end_lineno, left.end_col_offset), at(right.lineno, right.col_offset)  # type: ignore[arg-type]
        if found := re.search(r"not in|is not|[<>=!]=|//|[<>+\-*/%]|\b(?:in|is|and|or)\b", text[a:b]):
            yield a + found.start(), a + found.end(), wrong

    for node in _code(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from between(node.left, node.comparators[0], _SWAPS[type(node.ops[0])])
        elif isinstance(node, ast.BinOp) and type(node.op) in _SWAPS:
            yield from between(node.left, node.right, _SWAPS[type(node.op)])
        elif isinstance(node, ast.BoolOp):
            yield from between(node.values[0], node.values[1], _SWAPS[type(node.op)])
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            wrong = str(not node.value) if isinstance(node.value, bool) else str(node.value + 1)
            yield at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset), wrong  # type: ignore[arg-type]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset), "..."  # type: ignore[arg-type]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield at(node.lineno, node.col_offset), at(node.operand.lineno, node.operand.col_offset), ""


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """What runs: no annotations, no errors' texts, no asserts, no logging."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Raise, ast.Assert, ast.JoinedStr, ast.AnnAssign)):
            continue
        if isinstance(child, ast.Expr) and "log." in ast.unparse(child)[:12]:
            continue
        yield child
        yield from _code(child)


def _cpp_places(text: str) -> Iterator[tuple[int, int, str]]:
    clean = re.sub(r'//[^\n]*|/\*.*?\*/|"[^"\n]*"|^#[^\n]*', lambda m: "~" * len(m[0]), text, flags=re.S | re.M)
    for right, wrong in _CPP_SWAPS.items():
        for found in re.finditer(re.escape(right), clean):
            yield found.start(), found.end(), wrong


# ---- running ----

_OWN = "tests/test_suite.py"  # compares this table with the sources, so it would find each of them
_PATIENCE = 1800.0  # seconds for the tests of one fault; what hangs longer is found


def _copy() -> None:
    """This checkout as it is, with its environment; what its tests have compiled stays from fault to fault."""
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for top in {f.partition("/")[0] for f in files}:
        shutil.rmtree(COPY / top, ignore_errors=True)
    for file in files:
        if (ROOT / file).exists():
            (COPY / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, COPY / file, follow_symlinks=False)
    if not (COPY / ".venv").exists():
        (COPY / ".venv").symlink_to(ROOT / ".venv")
        subprocess.run(["git", "init", "-q", COPY], check=True)  # so that it can be asked for its files


def _tried(fault: Fault, graph: Graph, tier: str) -> dict[str, object]:
    """What the tests of a tier say to a fault: some files after the other, as collecting all takes most of a minute."""
    files = [f for f in graph.reached([fault.file]) if f != _OWN]
    fault.apply(COPY)
    begun, found = time.monotonic(), ""
    for part in (files[:10], files[10:50], files[50:]):
        if part and not found:
            found = _first_failure(part, tier)
    shutil.copy2(ROOT / fault.file, COPY / fault.file)
    return {"found by": found[:400], "files": len(files), "seconds": round(time.monotonic() - begun)}


def _first_failure(files: list[str], tier: str) -> str:
    """Of these tests in the copy; empty if they pass."""
    chosen = {"test": "not slow and not thorough", "all": "not slow"}[tier]
    command = [
        *(".venv/bin/python", "-m", "pytest", "-x", "-n", "auto", "--dist", "loadfile", "--as-given", "-m", chosen),
        *("-p", "no:cacheprovider", "--tb=line", "-rf"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(COPY)}
    run = subprocess.Popen(
        [*command, *files], cwd=COPY, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = run.communicate(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        return "hangs"
    if run.returncode in (0, 5):  # 5: none of these files has a test of the tier
        return ""
    return next(iter(re.findall(r"^(?:FAILED|ERROR) (.*)", said, re.M)), said[-400:])


def _results() -> dict[str, dict[str, dict[str, object]]]:
    """By fault, then by tier."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def _key(fault: Fault) -> str:
    return f"{fault.file}: {fault.what}"


def run(tier: str, numbers: list[int]) -> None:
    """Those of the table that have no result yet; with numbers, these again."""
    _copy()
    graph = Graph()
    for number, fault in enumerate(FAULTS):
        done = _results()
        known = done.setdefault(_key(fault), {})
        missed = known.get("test", {}).get("found by") == ""
        if number in numbers or (not numbers and tier not in known and (tier == "test" or missed)):
            known[tier] = _tried(fault, graph, tier)
            RESULTS.write_text(json.dumps(done, indent=1))
            print(number, fault.file, known[tier], flush=True)


def show() -> None:
    """How many were found, and by what."""
    done = _results()
    for tier in ("test", "all"):
        rows = [(n, f, done[_key(f)][tier]) for n, f in enumerate(FAULTS) if tier in done.get(_key(f), {})]
        print(f"{tier}: {sum(bool(row['found by']) for *_, row in rows)} of {len(rows)} found")
        for number, fault, row in rows:
            print(f"  {number:2} {fault.file}: {fault.what}: {row['found by'] or 'MISSED'} ({row['seconds']} s)")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--tier", choices=("test", "all"), default="test")
    running.add_argument("numbers", nargs="*", type=int)
    commands.add_parser("show")
    drawing = commands.add_parser("draw")
    drawing.add_argument("seeds", nargs="+", type=int)
    asked = parser.parse_args()
    if asked.command == "run":
        run(asked.tier, asked.numbers)
    elif asked.command == "show":
        show()
    else:
        for fault in map(draw, asked.seeds):
            print(f"{fault.seed} {fault.file}\n- {fault.right}\n+ {fault.wrong}")


if __name__ == "__main__":
    main()
