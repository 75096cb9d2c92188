"""The out-of-tree op of docs/adding-an-op.md: installed as a user would, listed, checked, timed and compiled."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE

PATHS = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "plugin_op"

COMPILE = """
import sys, tempfile
from pathlib import Path
import torch
from graphllm.compile.codegen.backends import Cpu
from graphllm.compile.codegen.objects import Objects
from graphllm.compile.trace import trace_unit
from graphllm.config import Bucket, CompileConfig, Target
from graphllm.ir.graph import Shapes, TensorSpec
from graphllm.ir.graph_form import to_json
from graphllm.ir.registry import load_ops
from graphllm.host.libraries import Libraries
from graphllm.runtime.kernels import CpuKernels
from graphllm.runtime.memory.torch_memory import TorchMemory
from graphllm.program.linking import LinkedProgram, PieceCall, plan_memory
from graphllm.runtime.binding import bind

ops = load_ops()
shapes, bucket = Shapes("cpu"), Bucket("mixed", 2, 64)
spec = TensorSpec.contiguous("float32", "T", 48)
unit = trace_unit("ffn", {"x": spec}, lambda v: (ops["squared_relu"](v["x"] + 1) * 2,), shapes)
out = unit.graph.output_node()
out.meta["val"] = tuple(n.meta["val"] for n in out.args[0])
folder = Path(tempfile.mkdtemp())
backend = Cpu(Objects())
built = backend.build(to_json(unit.graph, shapes), bucket, CompileConfig(Target("cpu", ())), {})
backend.assemble([built], folder)
program = LinkedProgram([PieceCall(built.bundle, ["x"], ["y"])], ["y"])
plan = plan_memory(program, bucket.limits(4))
x = torch.randn(7, 48)
arena = torch.zeros(plan.arena_bytes, dtype=torch.uint8)
memory = TorchMemory(torch.device("cpu"))
bound = bind(program, plan, {"x": x}, arena, CpuKernels(Libraries([folder / "kernels.so"])), {"T": 7, "S": 2}, memory)
for _, launches in bound.parts[""]:
    for launch in launches:
        launch()
torch.testing.assert_close(bound.results["y"], torch.relu(x + 1) ** 2 * 2)
print(built.chosen, len(built.sources))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user who has installed the example beside graphllm."""
    source = shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("source") / "plugin_op")
    return _installed(source, tmp_path_factory.mktemp("installed"))


def _installed(source: Path, target: Path) -> dict[str, str]:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*install, "--target", target, source], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), *PATHS]), "COLUMNS": "200"}


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-c", "from graphllm.cli import main; main()", *map(str, arguments)]


@pytest.fixture(scope="module")
def session(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], Any]:
    """What `op list`, `op test` and `op bench` print, and the results of the last; one process, to import once."""
    results = tmp_path_factory.mktemp("bench") / "times.json"
    commands = [["op", "list"], ["op", "test", "squared_relu"], ["op", "bench", "squared_relu", "-o", str(results)]]
    script = f"""
import sys
from graphllm.cli import main
for arguments in {commands!r}:
    sys.argv = ["graphllm", *arguments]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (arguments, end.code)
    print("=====")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr + done.stdout
    printed = done.stdout.split("=====\n")
    return {c[1]: text for c, text in zip(commands, printed, strict=False)}, json.loads(results.read_text())


def test_it_is_listed(session: tuple[dict[str, str], Any]) -> None:
    (line,) = (text for text in session[0]["list"].splitlines() if "squared_relu" in text)
    assert [cell.strip() for cell in line.strip("│").split("│")] == [
        "squared_relu", "", "reference only", "4", "max(x, 0)^2: [T, F] in x's dtype, contiguous.",
    ]  # fmt: skip


def test_it_passes_its_checks(session: tuple[dict[str, str], Any]) -> None:
    (row,) = (text for text in session[0]["test"].splitlines() if "specification" in text)
    _, _, checks, failed, share, _ = (cell.strip() for cell in row.strip("│").split("│"))
    assert int(checks) >= 10
    assert failed == "0"
    assert 0 < float(share) <= 1


def test_it_is_timed(session: tuple[dict[str, str], Any]) -> None:
    (result,) = session[1]["results"]
    assert (result["op"], result["case"], result["impl"]) == ("squared_relu", "T64_F4096", "reference")
    assert result["microseconds"] > 0
    bytes_moved = 2 * 64 * 4096 * 2
    rate = bytes_moved / (result["microseconds"] * 1e-6) / 1e9
    assert result["gigabytes_per_second"] == pytest.approx(rate)
    assert "T64_F4096" in session[0]["bench"]


@pytest.mark.thorough
def test_it_is_compiled(environment: dict[str, str]) -> None:
    """Its reference is lowered and fused with its neighbours into one kernel."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "('squared_relu: reference',) 1"


@pytest.mark.thorough
def test_a_failing_op_is_reported(environment: dict[str, str], tmp_path: Path) -> None:
    """A wrong shape function: exit status 1 and the problem in words."""
    broken = shutil.copytree(environment["PYTHONPATH"].split(os.pathsep)[0], tmp_path / "broken")
    source = broken / "plugin_op" / "op.py"
    fake = "@squared_relu.fake\ndef _(x_TF: Tensor) -> Tensor:\n    return x_TF.new_empty(x_TF.shape).double()\n"
    source.write_text(f"{source.read_text()}\n\n{fake}")
    command = _command("op", "test", "squared_relu")
    changed = environment | {"PYTHONPATH": os.pathsep.join([str(broken), *PATHS])}
    done = subprocess.run(command, env=changed, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert "but the fake says" in " ".join(done.stdout.split())


@pytest.fixture(scope="module")
def with_kernel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user who has followed the guide's section on a faster implementation, word for word."""
    source = shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("source") / "plugin_op")
    guide = (EXAMPLE.parents[1] / "adding-an-op.md").read_text().partition("## A faster implementation")[2]
    files = dict(re.findall(r"\n`(plugin_op/[\w.]+)`\n\n```\w+\n(.*?)```", guide, flags=re.DOTALL))
    assert sorted(files) == ["plugin_op/__init__.py", "plugin_op/cpu.cpp", "plugin_op/cpu.py"]
    for name, text in files.items():
        (source / name).write_text(text)
    (more,) = re.findall(r"```toml\n(.*?)```", guide, flags=re.DOTALL)
    (source / "pyproject.toml").write_text(f"{(source / 'pyproject.toml').read_text()}\n{more}")
    return _installed(source, tmp_path_factory.mktemp("installed"))


@pytest.mark.thorough
def test_its_kernel_is_listed_checked_and_compiled(with_kernel: dict[str, str]) -> None:
    script = (
        "import sys\nfrom graphllm.cli import main\n"
        "for words in (['list'], ['test', 'squared_relu']):\n"
        "    sys.argv = ['graphllm', 'op', *words]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code, words\n"
    )
    for text in (script, COMPILE):
        command = [sys.executable, "-c", text]
        done = subprocess.run(command, env=with_kernel, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr + done.stdout
        if text is COMPILE:
            assert done.stdout.splitlines()[-1].startswith("('squared_relu: cpu',)")
        else:
            lines = [line for line in done.stdout.splitlines() if "squared_relu" in line]
            rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
            assert ["cpu (cpu)" in row for row in rows] == [True, False, False]
            _, implementation, checks, failed, *_ = rows[-1]
            assert (implementation, failed) == ("cpu", "0")
            assert int(checks) >= 3


@pytest.mark.thorough
def test_a_source_that_was_not_installed_is_named(with_kernel: dict[str, str], tmp_path: Path) -> None:
    installed = shutil.copytree(with_kernel["PYTHONPATH"].split(os.pathsep)[0], tmp_path / "incomplete")
    (installed / "plugin_op" / "cpu.cpp").unlink()
    changed = with_kernel | {"PYTHONPATH": os.pathsep.join([str(installed), *PATHS])}
    done = subprocess.run(_command("op", "list"), env=changed, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "plugin_op/cpu.cpp does not exist" in " ".join(done.stderr.split())
    assert "[tool.setuptools.package-data]" in done.stderr


def test_the_guide_shows_these_files(environment: dict[str, str]) -> None:
    guide = (EXAMPLE.parents[1] / "adding-an-op.md").read_text()
    made = {"build", "plugin_op.egg-info"}  # by whoever has followed the guide here
    files = [
        f
        for f in sorted(EXAMPLE.rglob("*"))
        if f.suffix in (".py", ".toml") and not made & {*f.relative_to(EXAMPLE).parts}
    ]
    assert len(files) == 4
    for file in files:
        assert file.read_text() in guide, f"docs/adding-an-op.md shows another {file.name}"
    lines: Any = sum(len(f.read_text().splitlines()) for f in files)
    assert lines <= 50
