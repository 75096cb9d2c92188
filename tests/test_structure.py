"""The floors of docs/architecture.md: a file imports only what lies on its own floor or below it."""

from __future__ import annotations

import ast
import collections
import graphlib
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pytest

import graphllm

ROOT = Path(__file__).parents[1]
PACKAGE = Path(graphllm.__file__).parent

# From the ground up. Names on one line may import each other.
FLOORS = (
    ("config", "host", "embedded", "version"),
    ("program",),
    ("ir",),
    ("ops",),
    ("weights",),
    ("rewrite",),
    ("passes",),
    ("model_defs",),
    ("compile",),
    ("runtime",),
    ("engine",),
    ("loading",),
    ("chat",),
    ("entrypoints",),
    ("quantize",),
    ("server",),
    ("cli",),
)
# The rooms of a floor, and the files beside them, from the ground up. Names on one line do not import each other.
ROOMS = {
    "ops": (
        ("activations", "collectives", "cpu", "encodings", "norms", "rows"),
        ("attention", "embeddings", "sampling"),
        ("lora", "recurrent", "speculation"),
        ("gemm",),
        ("moe",),
    ),
    "weights": (("dtypes",), ("checkpoint", "encodings"), ("plan",), ("adapters", "formats"), ("loading",)),
    "compile": (
        ("described", "pieces", "tasks", "transformers_model"),
        ("families", "layout", "specialize"),
        ("row_order", "trace"),
        ("rewrites",),
        ("link", "passes"),
        ("codegen",),
        ("cost", "exports", "tuning"),
        ("building", "package"),
        ("pipeline",),
        ("worker",),
    ),
    "runtime": (
        ("cuda", "interpreter", "memory", "stream"),
        ("kernels", "sleeping", "staged_stream"),
        ("binding", "offloading"),
        ("graphs", "tiers"),
        ("commands", "drafting"),
        ("expert_slots", "profiling", "step_handle"),
        ("host_results", "opening"),
        ("programs",),
        ("executor",),
        ("ranks",),
    ),
    "engine": (
        ("chat_template", "drafts", "experts"),
        ("requests",),
        ("cache", "metrics"),
        ("process", "schedule"),
        ("events", "structured", "tiers", "vectors"),
        ("step",),
        ("transfer",),
        ("parts",),
        ("core",),
    ),
    "loading": (("checkpoint", "memory", "tiers"), ("artifact",), ("core",)),
    "server": (
        ("http", "page"),
        ("supervision",),
        ("service",),
        ("apis", "middleware"),
        ("compatibility", "multi_model"),
        ("app",),
        ("process",),
        ("router",),
    ),
}
SIDE_BY_SIDE = 16  # files in a folder; what is more gets rooms
FLAT = ("passes", "model_defs")  # one file each, however many

APART = ({"passes", "model_defs"}, {"compile", "runtime"})  # side by side: neither imports the other


def _height(name: str, floors: Sequence[Collection[str]] = FLOORS) -> int:
    return next(i for i, floor in enumerate(floors) if name in floor)


def _files() -> Iterator[tuple[str, Path]]:
    """Every product file with its path inside the package, the linked folders included."""
    for folder in (PACKAGE, *(PACKAGE / name for name in ("ops", "passes", "model_defs"))):
        for file in folder.rglob("*.py"):
            yield file.relative_to(PACKAGE).as_posix(), file


def _imported(file: Path) -> Iterator[str]:
    """What a file imports of the package, anywhere in it, by the names below it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            first, _, rest = name.partition(".")
            assert first not in ("ops", "passes", "model_defs"), f"{file}: imports bare {name}"
            if first == "graphllm" and rest and not rest.startswith("_"):
                yield rest


def test_arrows_only_go_down() -> None:
    wrong = set()
    for name, file in _files():
        own = name.partition("/")[0].removesuffix(".py")
        if own.startswith("_"):  # the package's own names: what users import
            continue
        for other in {rest.partition(".")[0] for rest in _imported(file)}:
            if other != own and ({own, other} in APART or _height(other) > _height(own)):
                wrong.add((name, other))
    assert wrong == set()


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_only_what_lies_below_them(package: str) -> None:
    wrong = set()
    for name, file in _files():
        inside = name.removeprefix(f"{package}/")
        own = inside.partition("/")[0].removesuffix(".py")
        if inside == name or own.startswith("_"):
            continue
        for rest in _imported(file):
            other = rest.removeprefix(f"{package}.").partition(".")[0]
            inner = rest.startswith(f"{package}.") and other != own
            if inner and _height(other, ROOMS[package]) >= _height(own, ROOMS[package]):
                wrong.add((name, other))
    assert wrong == set()


def test_folders_are_not_crowded() -> None:
    found = collections.Counter(str(Path(name).parent) for name, _ in _files())
    assert {f: n for f, n in found.items() if n > SIDE_BY_SIDE and f not in FLAT} == {}


def test_no_files_import_each_other() -> None:
    files = {name: file for name, file in _files() if not name.startswith("_")}

    def found(rest: str) -> str | None:
        """The file that a name below the package is in."""
        parts = rest.split(".")
        longest = ("/".join(parts[:n]) for n in range(len(parts), 0, -1))
        return next((f for path in longest for f in (f"{path}.py", f"{path}/__init__.py") if f in files), None)

    arrows = {
        name: {f for rest in _imported(file) if (f := found(rest)) not in (None, name)} for name, file in files.items()
    }
    graphlib.TopologicalSorter(arrows).prepare()


def test_the_page_on_architecture_has_these_floors() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (.*?) \|", text.partition("| floor | holds |")[2].partition("\n## ")[0], flags=re.MULTILINE)
    told = [name.strip("/") for row in rows for name in re.findall(r"`([\w/]+)`", row)]
    listed = [name for floor in FLOORS for name in floor if name in told]
    assert told == listed
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and not p.name.startswith("_")}
    assert folders <= {*told, "embedded", "prebuilt"}  # the last has kernels that an installation made
