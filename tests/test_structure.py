"""The floors of docs/architecture.md: a file imports only what lies on its own floor or below it."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import graphllm

ROOT = Path(__file__).parents[1]
PACKAGE = Path(graphllm.__file__).parent

# From the ground up. Names on one line may import each other.
FLOORS = (
    (
        "config",
        "cpp",
        "cuda_driver",
        "expr",
        "garbage",
        "hugepages",
        "imports",
        "machine",
        "specs",
        "embedded",
        "version",
    ),
    ("ir",),
    ("ops",),
    ("weights",),
    ("rewrite",),
    ("passes",),
    ("model_defs",),
    ("program", "artifact"),
    ("compile",),
    ("runtime",),
    ("engine",),
    ("entrypoints",),
    ("quantize",),
    ("server",),
    ("cli",),
)
APART = ({"passes", "model_defs"}, {"compile", "runtime"})  # side by side: neither imports the other


def _height(name: str) -> int:
    return next(i for i, floor in enumerate(FLOORS) if name in floor)


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
    assert {p.name for p in PACKAGE.iterdir() if p.is_dir() and not p.name.startswith("_")} <= {*told, "embedded"}
