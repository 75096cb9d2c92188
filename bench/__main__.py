"""`python -m bench` lists the cases, `python -m bench NAME [options]` runs one.

`python -m bench report` writes the page of all results.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from bench import record, report
from bench.harness import VOID, Case, Rows, rows_of

CASES_FOLDER = Path(__file__).with_name("cases")


class Entry(NamedTuple):
    """A case of the list. module: its file's name for Python; about: the first sentence of the file."""

    module: str
    about: str


def find_cases() -> dict[str, Entry]:
    """All cases by name, read from the files without running them."""
    found: dict[str, Entry] = {}
    for file in sorted(CASES_FOLDER.glob("*/*.py")):
        tree = ast.parse(file.read_text())
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "CASES":
                assert isinstance(node.value, ast.List)
                names = [ast.literal_eval(one.elts[0]) for one in node.value.elts if isinstance(one, ast.Tuple)]
                about = (ast.get_docstring(tree) or "").partition("\n\n")[0].replace("\n", " ").partition(". ")[0]
                found |= dict.fromkeys(names, Entry(f"bench.cases.{file.parent.name}.{file.stem}", about))
    return found


def listing(cases: dict[str, Entry]) -> str:
    """A line for each case."""
    lines = ["usage: python -m bench NAME [options], or python -m bench report", ""]
    for name, entry in cases.items():
        lines.append(f"{entry.module.split('.')[2]:7} {name:22} {entry.about}")
    return "\n".join(lines)


def parser_of(name: str, module: Any) -> argparse.ArgumentParser:
    """The options of a case: its settings, with its values as defaults.

    A setting that is a type is a positional argument, and one in a list is one or more of them. Of a tuple the values
    stand between commas.
    """
    settings, helps = dict(module.CASES)[name], getattr(module, "HELP", {})
    parser = argparse.ArgumentParser(
        prog=f"python -m bench {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for setting, usual in settings.items():
        option, about = "--" + setting.replace("_", "-"), helps.get(setting, "").replace("%", "%%")
        if isinstance(usual, type):
            parser.add_argument(setting, type=usual, help=about)
        elif isinstance(usual, list):
            parser.add_argument(setting, type=usual[0], nargs="+", help=about)
        elif isinstance(usual, bool):
            parser.add_argument(option, action="store_true", default=usual, help=about)
        elif isinstance(usual, tuple):
            kind = type(usual[0])
            parser.add_argument(
                option, default=usual, metavar="A,B", help=f"{about} (default: {','.join(map(str, usual))})".strip(),
                type=lambda text, kind=kind: tuple(kind(word) for word in text.split(",") if word),
            )  # fmt: skip
        else:
            kind = type(usual) if usual is not None else Path
            shown = "" if usual in ("", None) else f" (default: {usual})".replace("%", "%%")
            parser.add_argument(option, type=kind, default=usual, help=f"{about}{shown}".strip())
    parser.add_argument(
        "--out", type=Path, help="a JSON file, or a folder for MACHINE/CASE.json. Without it a run with the case's own "
        "settings replaces its file in bench/results, and a run with others is only printed.",
    )  # fmt: skip
    return parser


def run(name: str, words: list[str]) -> dict[str, Any]:
    """Run a case; its record, which is written after every part of the figures."""
    entry = find_cases()[name]
    module = importlib.import_module(entry.module)
    args = vars(parser_of(name, module).parse_args(words))
    out = args.pop("out")
    usual = dict(module.CASES)[name]
    own = all(value == usual[setting] or isinstance(usual[setting], (type, list)) for setting, value in args.items())
    case = Case(name, args)
    device = "cuda" if entry.module.startswith("bench.cases.gpu") and "target" not in args else case.device
    command = shlex.join(["python", "-m", "bench", name, *words])
    rows: Rows = {}
    found: dict[str, Any] = {}
    for part in _parts(module.run(case)):
        rows |= rows_of(part)
        found = record.record(name, device, command, getattr(module, "PACKAGES", ()), rows)
        if own or out is not None:
            record.write(found, record.place_of(found, out))
    return found


def _parts(figures: dict[str, Any] | Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    return [figures] if isinstance(figures, dict) else figures


def main() -> None:
    """Do what the command line says."""
    os.environ.setdefault("GRAPHLLM_OPTIMIZE", "first")  # what is measured does not change meanwhile
    cases, words = find_cases(), sys.argv[1:]
    if words[:1] == ["report"]:
        report.PAGE.write_text(report.page())
    elif words[:1] and words[0] in cases:
        found = run(words[0], words[1:])
        print(record.to_text(found))
        if void := [name for name in found["rows"] if name.split(", ")[-1] == VOID]:
            sys.exit(f"the work is not real: {found['rows'][void[0]]['why']}")
    else:
        print(listing(cases))
        sys.exit(0 if not words or words[0] in ("-h", "--help") else f"{words[0]}: no such case")


if __name__ == "__main__":
    main()
