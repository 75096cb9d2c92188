"""Weights that are read while torch is imported: the bytes that the loader gives, and nothing where that cannot be; the
CUDA driver is a library whose memory is the host's."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from graphllm.weights.checkpoint.checkpoint import Checkpoint, WeightError
from graphllm.weights.loading import baked
from graphllm.weights.loading.layout import baked_layout, checkpoint_layout
from graphllm.weights.loading.loader import load_weights
from graphllm.weights.plan import expr as ex
from graphllm.weights.plan.plan import Entry, WeightPlan
from tests.stub_driver import run_with_driver

# Reads in chunks of 40 bytes, which cut numbers, and prints every parameter's bytes.
SCRIPT = """
import ctypes, json, sys
from pathlib import Path
from graphllm.program import baked_table as baked
from graphllm.weights.loading import early_reading as early
from graphllm.weights.checkpoint.checkpoint import Checkpoint
from graphllm.weights.loading.layout import baked_layout, checkpoint_layout
from graphllm.weights.plan.plan import WeightPlan
folder, then = Path(sys.argv[1]), sys.argv[2:]
early._CHUNK = 4096 if "long" in then else 40
def find():
    if "baked" in then:
        return baked_layout(folder / baked.DATA, baked.check(folder)["tensors"])
    checkpoint = Checkpoint.open(folder)
    layout = checkpoint_layout(WeightPlan.from_json((folder / "weights.json").read_text()), checkpoint)
    if "cut" in then:
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate(layout.moves[-1].offset)
    return layout
weights = early.EarlyWeights(find)
begun = weights._begun.result()
told = []
def report(done, total):
    told.append((done, total))
    if "stop" in then:
        raise InterruptedError("stopped")
try:
    if begun is None:
        print("none")
    else:
        weights.finish(report)
        layout, block = begun
        sizes = {"bfloat16": 2, "float32": 4, "int8": 1}
        for name, place in layout.places.items():
            count = sizes[place.dtype]
            for n in place.shape:
                count *= n
            print(json.dumps([name, place.shape, place.dtype, ctypes.string_at(block.address + place.at, count).hex()]))
        if told:
            assert told[-1][0] == told[-1][1] == sum(move.nbytes for move in layout.moves)
        del block
except Exception as failure:
    print(type(failure).__name__, failure)
weights.close()
del weights, begun
assert "torch" not in sys.modules
"""
A = torch.arange(48, dtype=torch.float32).view(6, 8)
B = torch.arange(32, dtype=torch.float32).view(4, 8) + 0.5
READ_A, READ_B = ex.Read(("a",), (6, 8)), ex.Read(("b", "other"), (4, 8))
PLAIN: dict[str, tuple[tuple[int, ...], ex.Expr]] = {
    "whole": ((6, 8), READ_A),
    "joined": ((10, 8), ex.Concat((READ_B, READ_A))),
    "rows": ((2, 8), ex.Slice(READ_A, 0, 3, 5)),
    "stacked": ((2, 4, 8), ex.Stack((READ_B, ex.Slice(READ_A, 0, 2, 6)))),
    "flat": ((48,), ex.Reshape(READ_A, (48,))),
    "part of a row": ((1, 3), ex.Slice(ex.Slice(READ_A, 0, 2, 3), 1, 4, 7)),
    "values": ((3,), ex.Values((0.25, -2.0, 1e-3), (3,))),
    "tied": ((10, 8), ex.Tie("joined")),
}


def _saved(folder: Path, entries: dict[str, tuple[tuple[int, ...], ex.Expr]], dtype: str = "float32") -> WeightPlan:
    """A checkpoint, and a plan beside it."""
    save_file({"a": A, "b": B}, folder / "model.safetensors")
    plan = WeightPlan(tuple(Entry(name, shape, dtype, expr) for name, (shape, expr) in entries.items()))
    (folder / "weights.json").write_text(plan.to_json())
    return plan


def _read(folder: Path, *then: str, **said: int) -> tuple[list[str], list[str]]:
    return run_with_driver(folder, SCRIPT, str(folder), *then, **said)


def _same(printed: list[str], expected: dict[str, torch.Tensor]) -> None:
    found: dict[str, Any] = {line[0]: line[1:] for line in map(json.loads, printed)}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex()
        assert found[name] == [list(tensor.shape), str(tensor.dtype).removeprefix("torch."), data], name


def test_the_bytes_are_those_that_the_loader_gives(tmp_path: Path) -> None:
    plan = _saved(tmp_path, PLAIN)
    printed, calls = _read(tmp_path)
    _same(printed, load_weights(plan, Checkpoint.open(tmp_path)))
    assert calls.count("free") == 1


def test_of_a_model(eager_artifact: Path, checkpoint: Path, tmp_path: Path) -> None:
    for file in (checkpoint / "model.safetensors", eager_artifact / "weights.json"):
        shutil.copy(file, tmp_path)
    plan = WeightPlan.from_json((tmp_path / "weights.json").read_text())
    _same(_read(tmp_path, "long")[0], load_weights(plan, Checkpoint.open(checkpoint)))


def test_of_baked_weights_too(tmp_path: Path) -> None:
    plan = _saved(tmp_path, PLAIN)
    baked.bake(tmp_path, Checkpoint.open(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    printed, _ = _read(tmp_path, "baked")
    _same(printed, baked.open_weights(tmp_path))
    assert {e.name for e in plan} == set(PLAIN)


@pytest.mark.parametrize(
    "expr",
    [
        ex.Permute(ex.Read(("a",), (6, 8)), (1, 0)),
        ex.Concat((READ_A, ex.Slice(READ_A, 1, 0, 4)), 1),
        ex.Slice(READ_A, 1, 2, 5),
        ex.Repeat(READ_B, 0, 2),
        ex.Cast(READ_B, "bfloat16"),
        ex.Encode("int8", "values", READ_A),
    ],
    ids=lambda expr: expr.op,
)
def test_the_rest_is_left_to_the_loader(expr: ex.Expr, tmp_path: Path) -> None:
    plan = WeightPlan((*_saved(tmp_path, PLAIN), Entry("more", expr.shape, "float32", expr)))
    assert checkpoint_layout(plan, Checkpoint.open(tmp_path)) is None


def test_numbers_that_are_rounded_are_left_to_the_loader(tmp_path: Path) -> None:
    plan = _saved(tmp_path, {"whole": PLAIN["whole"], "joined": PLAIN["joined"]}, "bfloat16")
    assert checkpoint_layout(plan, Checkpoint.open(tmp_path)) is None


def test_parameters_do_not_overlap(tmp_path: Path) -> None:
    plan = _saved(tmp_path, PLAIN)
    layout = checkpoint_layout(plan, Checkpoint.open(tmp_path))
    assert layout is not None
    spans = sorted((layout.places[e.name].at, e.nbytes) for e in plan if not e.tie)
    assert all(at % 512 == 0 for at, _ in spans)
    assert all(
        at + size <= after for (at, size), (after, _) in zip(spans, [*spans[1:], (layout.nbytes, 0)], strict=True)
    )
    table = {"one": {"offset": 4096, "nbytes": 12, "shape": [3], "dtype": "float32"}}
    assert baked_layout(Path("file"), {**table, "tied": table["one"]}).nbytes == 512


def test_what_fails_first_is_left_to_the_loader(tmp_path: Path) -> None:
    """No driver, no GPU, too little memory, a checkpoint that does not fit: it says the same, and better."""
    _saved(tmp_path, PLAIN)
    assert run_with_driver(tmp_path, SCRIPT, str(tmp_path), driver=False) == (["none"], [])
    assert _read(tmp_path, INIT=100) == (["none"], ["init"])
    printed, _ = _read(tmp_path, ALLOC=2)
    assert printed == ["none"]
    plan = _saved(tmp_path, {"whole": ((6, 8), ex.Read(("c",), (6, 8)))})
    with pytest.raises(WeightError, match="missing"):
        load_weights(plan, Checkpoint.open(tmp_path))
    assert _read(tmp_path)[0] == ["none"]


def test_what_fails_later_is_raised(tmp_path: Path) -> None:
    _saved(tmp_path, PLAIN)
    assert _read(tmp_path, COPY=700)[0] == ["CudaError cuMemcpyHtoDAsync_v2 failed: the driver's words (code 700)"]
    printed, _ = _read(tmp_path, "cut")
    assert printed == [
        f"WeightError {tmp_path / 'model.safetensors'}: ends too early: the file has changed since it was opened"
    ]


def test_reading_is_interrupted(tmp_path: Path) -> None:
    big = torch.zeros(1 << 20)
    save_file({"a": big}, tmp_path / "model.safetensors")
    plan = WeightPlan((Entry("a", (1 << 20,), "float32", ex.Read(("a",), (1 << 20,))),))
    (tmp_path / "weights.json").write_text(plan.to_json())
    assert _read(tmp_path, "stop")[0] == ["InterruptedError stopped"]


def test_nothing_of_it_imports_torch() -> None:
    modules = "graphllm.weights.loading.early_reading, graphllm.weights.loading.layout"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
