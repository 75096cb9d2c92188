"""Which test files a changed file can touch: those whose imports reach it, the nearest first.

Every file is two nodes. ``file``: what its import runs. ``file()``: what its functions may run, too. An edge leads to
every module that is imported there, to modules and folders whose names stand there as strings
("graphllm.engine.process.core_loop", "graphllm.ops", "graphllm.weights.formats." with a name behind it), to headers
that C++ includes, and from Python to other sources in its folder. A test file also needs the fixtures of conftest.py
that it names, and the files of the repository that it names.

Run as a program: `python tests/reach.py COMMIT` prints the test files for what changed since that commit.
"""

from __future__ import annotations

import ast
import collections
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINKED = ("ops", "passes", "model_defs")  # folders of the repository that are part of the package
SOURCES = ("graphllm", *LINKED, "bench", "tests")
READ = {"docs", "deploy", "bench"}  # folders that a test which names them may read
WHOLE = {"pyproject.toml", "constraints.txt", "Makefile"}  # all tests may see what they change
_MODULE = re.compile(r"graphllm(?:\.\w+)+")


class Graph:
    """needs: the nodes that each node needs. root: of the repository."""

    def __init__(self, root: Path = ROOT) -> None:
        listed = _git("ls-files", "-co", "--exclude-standard", root=root)
        self.root, self.files = root, {f for f in listed if (root / f).is_file()}
        self.needs: dict[str, set[str]] = collections.defaultdict(set)
        sources = [f for f in self.files if f.partition("/")[0] in SOURCES]
        self._modules = {_module(f): f for f in sources if f.endswith(".py")}
        self._trees: dict[str, ast.Module] = {}
        self._by_name: dict[str, list[str]] = collections.defaultdict(list)  # file name -> paths
        beside: dict[str, list[str]] = collections.defaultdict(list)  # folder -> its Python files
        for f in sources:
            if f.endswith(".py"):
                beside[Path(f).parent.as_posix()].append(f)
        for f in self.files:
            self._by_name[Path(f).name].append(f)
        for f in sources:
            if f.endswith(".py"):
                self._python(f)
            else:
                if f.endswith((".cpp", ".h")):
                    self._includes(f)
                if not f.startswith("tests/"):
                    folder = next(p for p in map(Path.as_posix, Path(f).parents) if p in beside)
                    for other in beside[folder]:
                        self.needs[f"{other}()"].add(f)

    def tests(self) -> list[str]:
        """Every test file."""
        return sorted(f for f in self.files if re.fullmatch(r"tests/(.*/)?test_\w+\.py", f))

    def reached(self, changed: Iterable[str]) -> list[str]:
        """Test files that reach one of these files, the nearest first; a test file reaches itself."""
        changed = list(changed)
        if WHOLE.intersection(changed):
            return self.tests()
        back: dict[str, list[str]] = collections.defaultdict(list)
        for node, needed in self.needs.items():
            for other in needed:
                back[other].append(node)
        distance = {
            node: 0 for f in changed for node in (f, f"{f}()", *(n for n in self.needs if n.startswith(f"{f}:")))
        }
        queue = collections.deque(distance)
        while queue:
            node = queue.popleft()
            for other in back[node]:
                if other not in distance:
                    distance[other] = distance[node] + 1
                    queue.append(other)
        found = {f: distance[node] for f in self.tests() for node in (f"{f}()", f) if node in distance}
        near = {f for f in found if any(_mirrors(f, c) for c in changed)}
        return sorted(found, key=lambda f: (f not in near, found[f], f))

    def _python(self, file: str) -> None:
        tree = self._parsed(file)
        self.needs[f"{file}()"].add(file)
        conftest = file.endswith("/conftest.py")
        for node, function in _nodes(tree):
            target = f"{file}:{function}" if conftest and function else f"{file}()" if function else file
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names]
                if isinstance(node, ast.ImportFrom):
                    names = [name for n in names for name in (node.module or "", f"{node.module}.{n}")]
                for name in names:
                    self._import(file, target, name)
            elif isinstance(node, ast.Constant):
                words = _MODULE.findall(node.value)
                if file == "graphllm/__init__.py":  # its table of public names, each imported when it is used
                    target, words = f"{file}()", [f"graphllm.{node.value.partition(':')[0]}"]
                for word in words:
                    if word.rpartition(".")[2] in LINKED or node.value == f"{word}.":  # it imports what lies there
                        for name, f in self._modules.items():
                            if name.startswith(f"{word}."):
                                self.needs[f"{file}()"] |= {f, f"{f}()"}
                    if word in self._modules:
                        self._import(file, target, word)
                if file.startswith("tests/"):
                    for f in self._by_name.get(Path(node.value).name, ()):
                        if _named(node.value, f):
                            self.needs[target] |= {f, f"{f}()"}
                    if node.value in READ and Path(file).name.startswith("test_"):
                        self.needs[target].update(f for f in self.files if f.startswith(f"{node.value}/"))
        if file.startswith("tests/"):
            self._fixtures(file, tree)

    def _parsed(self, file: str) -> ast.Module:
        if file not in self._trees:
            self._trees[file] = ast.parse((self.root / file).read_text())
        return self._trees[file]

    def _import(self, file: str, target: str, name: str) -> None:
        parts = name.split(".")
        found = [self._modules[p] for n in range(1, len(parts) + 1) if (p := ".".join(parts[:n])) in self._modules]
        if not found and file.startswith("tests/"):  # a helper that lies in a folder of tests, by its bare name
            found = [f for f in self._by_name[f"{parts[0]}.py"] if f.startswith("tests/")]
        for f in found:
            if f != file:
                self.needs[target].add(f)
        if found and found[-1] != file:  # what its functions need; of the packages around it, only what an import runs
            self.needs[target if target != file else f"{file}()"].add(f"{found[-1]}()")

    def _fixtures(self, file: str, tree: ast.Module) -> None:
        """Of a test file or conftest.py: the functions of conftest.py, here or above, that its functions ask for."""
        asked = _asked(tree)
        for folder in [p.as_posix() for p in Path(file).parents][:-1]:
            conftest = f"{folder}/conftest.py"
            if conftest not in self.files:
                continue
            functions = [n for n in self._parsed(conftest).body if isinstance(n, ast.FunctionDef)]
            if conftest != file:
                self.needs[file].add(conftest)
                for node in functions:
                    if node.name in asked or any("autouse" in ast.unparse(d) for d in node.decorator_list):
                        self.needs[f"{file}()"].add(f"{conftest}:{node.name}")
            for node in functions if conftest == file else ():
                inside = _asked(node)
                for other in functions:
                    if other.name in inside and other is not node:
                        self.needs[f"{file}:{node.name}"].add(f"{file}:{other.name}")

    def _includes(self, file: str) -> None:
        folder = Path(file).parent
        for name in re.findall(r'#include "([^"]+)"', (self.root / file).read_text()):
            for place in (folder / name, Path("ops") / name):
                if place.as_posix() in self.files:
                    self.needs[file].add(place.as_posix())


def _nodes(tree: ast.AST, function: str = "") -> Iterator[tuple[ast.AST, str]]:
    """Imports and strings, each with the outermost function that it stands in. Docstrings, and what only the type
    checker reads, left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str)
        ):
            yield node, function
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for other in node.orelse:
                yield from _nodes(other, function)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        else:
            named = node.name if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else ""
            yield from _nodes(node, function or named)


def _asked(tree: ast.AST) -> set[str]:
    """Names of parameters, names that are called, and strings: whatever may be a fixture's name."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.add(node.func.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def _module(file: str) -> str:
    """The name by which a file is imported."""
    name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"graphllm.{name}" if name.partition(".")[0] in LINKED else name


def _named(text: str, file: str) -> bool:
    return "." in text and f"/{file}".endswith(f"/{text}")


def _mirrors(test: str, changed: str) -> bool:
    """Whether a test file lies in the folder, or has the name, of what it tests: tests/ mirrors the package."""
    path = Path(changed.removeprefix("graphllm/"))
    return path.stem.strip("_") in Path(test).stem or path.parts[0] == Path(test).parts[1]


def _git(*command: str, root: Path = ROOT) -> list[str]:
    return subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()


def changed_since(commit: str) -> list[str]:
    """Files that differ from a commit, or are not in it, in this checkout."""
    return _git("diff", "--name-only", commit) + _git("ls-files", "--others", "--exclude-standard")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/reach.py COMMIT")
    print(*Graph().reached(changed_since(sys.argv[1])), sep="\n")
