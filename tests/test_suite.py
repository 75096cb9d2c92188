"""How the suite runs itself: which tests a change reaches, and that the faults it is measured by can still be made."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

from tests import faults
from tests.reach import Graph
from tests.tiers import ON_GPU

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def graph() -> Graph:
    return Graph()


@pytest.mark.parametrize(
    ("changed", "reached", "spared"),
    [
        ("graphllm/engine/cache/block_pool.py", "engine/cache/test_block_pool.py", "server/chat/test_tools.py"),
        ("graphllm/loading/core/core_main.py", "engine/test_async_llm.py", "weights/test_expr.py"),  # by its name
        ("ops/cpu/integers/rows.h", "ops/test_quant_linear_cpu.py", "server/chat/test_replies.py"),  # by #include
        ("graphllm/weights/formats/gptq.py", "weights/test_quantized_checkpoints.py", "server/chat/test_replies.py"),
        ("ops/attention/rope/op.py", "models/test_parity.py", "server/chat/test_replies.py"),  # by the registry
        ("model_defs/opt.py", "models/test_parity.py", "server/chat/test_replies.py"),
        ("graphllm/server/page/markdown.js", "server/page/test_page.py", "engine/schedule/test_scheduling.py"),
        ("tests/server/conftest.py", "server/test_trouble.py", "engine/test_core.py"),
        ("tests/engine/harness.py", "engine/test_core.py", "engine/requests/test_text.py"),
        ("docs/adding-an-op.md", "test_guides.py", "engine/schedule/test_scheduling.py"),
        ("tests/engine/test_core.py", "engine/test_core.py", "engine/requests/test_text.py"),
    ],
)
@pytest.mark.thorough
def test_what_a_change_reaches(graph: Graph, changed: str, reached: str, spared: str) -> None:
    found = graph.reached([changed])
    assert f"tests/{reached}" in found
    assert f"tests/{spared}" not in found


@pytest.mark.thorough
def test_what_all_tests_need(graph: Graph) -> None:
    for file in ("pyproject.toml", "constraints.txt", "tests/conftest.py"):
        assert graph.reached([file]) == graph.tests() or set(graph.reached([file])) == set(graph.tests())


@pytest.mark.thorough
def test_the_nearest_come_first(graph: Graph) -> None:
    assert graph.reached(["graphllm/engine/cache/block_pool.py"])[0] == "tests/engine/cache/test_block_pool.py"


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.file)
def test_a_fault_can_be_made(fault: faults.Fault) -> None:
    text = (ROOT / fault.file).read_text()
    assert text.count(fault.right) == 1, f"mend it in tests/faults.py: {fault.what}"
    wrong = text.replace(fault.right, fault.wrong)
    if fault.file.endswith(".py"):
        assert ast.dump(ast.parse(wrong)) != ast.dump(ast.parse(text))


def test_there_are_forty_half_of_them_drawn() -> None:
    drawn = [fault.seed for fault in faults.FAULTS if fault.seed is not None]
    assert (len(faults.FAULTS), len(drawn)) == (40, 20)
    assert sorted({*drawn, *faults.SKIPPED}) == list(range(1, max(drawn) + 1))  # in order, none left out unsaid


@pytest.mark.skipif(ON_GPU, reason="they are collected")
@pytest.mark.parametrize("file", sorted((ROOT / "tests" / "gpu").glob("test_*.py")), ids=lambda file: file.name)
def test_what_needs_a_gpu_can_be_imported(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(file.parent)
    runpy.run_path(str(file))
