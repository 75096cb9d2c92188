"""The linker: random programs run in planned memory give what they give when every value has memory of its own."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from graphllm.program.expr import value
from graphllm.program.linking import LinkedProgram, PieceCall, plan_memory
from graphllm.runtime.binding import bind
from graphllm.runtime.memory.torch_memory import TorchMemory
from tests.tiers import draws

MEMORY = TorchMemory(torch.device("cpu"))

LIMITS = {"T": 9, "S": 4}
GUARD = 4096


@dataclass
class Value:
    """What the generator knows of a tensor it made."""

    rows: int | str
    width: int
    stride: int
    writable: bool = True


@dataclass
class Program:
    """A random program: calls in the linker's terms, and the outside tensors."""

    outside: dict[str, Value] = field(default_factory=dict)
    calls: list[PieceCall] = field(default_factory=list)
    results: list[str] = field(default_factory=list)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    program = Program()
    rows = st.sampled_from(["T", "S", "S + 1", 3])
    known: dict[str, Value] = {}
    for i in range(draw(st.integers(1, 2))):
        width = draw(st.integers(1, 4))
        known[f"w{i}"] = Value(draw(rows), width, width, writable=False)
    program.outside = dict(known)
    made: list[str] = []
    for number in range(draw(st.integers(1, 4))):
        read = draw(st.lists(st.sampled_from(sorted(known)), min_size=1, max_size=3, unique=True))
        local = {f"p{i}": Value(known[n].rows, known[n].width, known[n].stride, False) for i, n in enumerate(read)}
        inputs, code, fresh = list(local), [], []
        for step in range(draw(st.integers(1, 6))):
            kind = draw(st.sampled_from(["new", "new", "view", "again"]))
            if kind == "view":
                base = draw(st.sampled_from(sorted(local)))
                of = local[base]
                skip = draw(st.integers(0, of.width - 1))
                name = f"view{step}"
                local[name] = Value(of.rows, of.width - skip, of.stride, of.writable)
                code.append(["view", name, base, [of.rows, of.width - skip], [of.stride, 1], skip])
                fresh += [name] if of.writable else []
                continue
            writable = [n for n, v in local.items() if v.writable]
            if kind == "again" and writable:
                target = draw(st.sampled_from(sorted(writable)))
            else:
                target, width = f"b{step}", draw(st.integers(1, 5))
                stride = width + draw(st.integers(0, 2))
                code.append(["empty", target, [size := draw(rows), width], [stride, 1], "int64"])
            sources = draw(st.lists(st.sampled_from(sorted(local)), min_size=1, max_size=3))
            if target not in local:
                local[target] = Value(size, width, stride)
                fresh.append(target)
                sources = [s for s in sources if s != target]
            arguments: list[Any] = []
            for name in [*sources, target]:
                v = local[name]
                arguments += [["t", name], ["i", v.rows], ["i", v.width], ["i", v.stride]]
            code.append(["kernel", "mix", arguments])
        if not fresh:
            code += [["empty", "last", [2, 2], [2, 1], "int64"], ["kernel", "mix", _argument("last", 2, 2, 2)]]
            local["last"], fresh = Value(2, 2, 2), ["last"]
        outputs = draw(st.lists(st.sampled_from(fresh), min_size=1, unique=True))
        names = [f"v{number}.{i}" for i in range(len(outputs))]
        bundle = {"inputs": inputs, "outputs": outputs, "code": code, "kernels": {"mix": {}}}
        program.calls.append(PieceCall(bundle, read, names))
        for name, out in zip(names, outputs, strict=True):
            v = local[out]
            known[name] = Value(v.rows, v.width, v.stride, writable=False)
        made += names
    program.results = draw(st.lists(st.sampled_from(made), min_size=1, unique=True))
    return program


def _argument(name: str, rows: Any, width: int, stride: int) -> list[Any]:
    return [["t", name], ["i", rows], ["i", width], ["i", stride]]


def _mix(arrays: Sequence[np.ndarray]) -> None:
    """Overwrite the last array with something that depends on every element of the others."""
    *sources, out = arrays
    out[...] = -1  # before reading, as a kernel on many threads may: an input must not share the output's memory
    total = sum(int((s * (np.arange(s.size).reshape(s.shape) + 3)).sum()) for s in sources)
    out[...] = np.arange(out.size).reshape(out.shape) * 17 + total % 1_000_003 + len(sources)


class FakeKernels:
    """Kernels in Python that get what real ones get: addresses and numbers."""

    def bind(self, kernel: Mapping[str, Any], name: str, arguments: Sequence[Any]) -> Callable[[], None]:
        arrays = []
        for at in range(0, len(arguments), 4):
            address, rows, width, stride = arguments[at : at + 4]
            flat = np.ctypeslib.as_array((ctypes.c_int64 * max(1, (rows - 1) * stride + width)).from_address(address))
            arrays.append(as_strided(flat, (rows, width), (stride * 8, 8)))
        return functools.partial(_mix, arrays)


def _expected(program: Program, outside: Mapping[str, np.ndarray], symbols: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The program run value by value, each buffer in memory of its own."""
    values = dict(outside)
    for bundle, inputs, outputs in program.calls:
        local = {n: values[i] for n, i in zip(bundle["inputs"], inputs, strict=True)}
        for kind, name, *rest in bundle["code"]:
            if kind == "empty":
                (rows, width), (stride, _), _ = rest
                rows = value(rows, symbols)
                local[name] = as_strided(np.zeros(rows * stride + width, np.int64), (rows, width), (stride * 8, 8))
            elif kind == "view":
                base, (rows, width), _, offset = rest
                local[name] = local[base][:, offset : offset + width]
            else:
                _mix([local[n] for (_, n) in rest[0][::4]])
        values |= {o: local[n] for n, o in zip(bundle["outputs"], outputs, strict=True)}
    return {r: values[r].copy() for r in program.results}


@settings(deadline=None, max_examples=draws(66, 200), suppress_health_check=[HealthCheck.too_slow])
@given(program=programs(), T=st.integers(1, LIMITS["T"]), S=st.integers(1, LIMITS["S"]))
def test_planned_memory_changes_nothing(program: Program, T: int, S: int) -> None:
    linked = LinkedProgram(program.calls, program.results)
    plan = plan_memory(linked, LIMITS)
    for symbols in ({"T": T, "S": S}, LIMITS):
        rng = np.random.default_rng(0)
        outside = {n: rng.integers(1, 99, (value(v.rows, symbols), v.width)) for n, v in program.outside.items()}
        memory = torch.full((plan.arena_bytes + GUARD,), 0x5A, dtype=torch.uint8)
        arena = memory[: max(plan.arena_bytes, 8)]
        tensors = {n: torch.from_numpy(a.copy()) for n, a in outside.items()}
        bound = bind(linked, plan, tensors, arena, FakeKernels(), symbols, MEMORY)
        for _ in range(2):  # a bound program is run many times over the same memory
            for _, launches in bound.parts[""]:
                for launch in launches:
                    launch()
            for name, expected in _expected(program, outside, symbols).items():
                assert np.array_equal(bound.results[name].numpy(), expected)
        assert bool((memory[plan.arena_bytes :] == 0x5A).all()), "written behind the arena"
        assert all(np.array_equal(tensors[n].numpy(), a) for n, a in outside.items())


def _chain(length: int, rows: int | str = "T") -> list[PieceCall]:
    """Calls that each make one value [rows, 32] of int64 from the one before."""
    bundle = {
        "inputs": ["a"], "outputs": ["b"], "kernels": {"mix": {}},
        "code": [["empty", "b", [rows, 32], [32, 1], "int64"],
                 ["kernel", "mix", [*_argument("a", rows, 32, 32), *_argument("b", rows, 32, 32)]]],
    }  # fmt: skip
    return [PieceCall(bundle, [f"v{i}"], [f"v{i + 1}"]) for i in range(length)]


def test_memory_is_reused_exactly() -> None:
    """A chain of any length needs two values at a time, 9 x 32 x 8 bytes each: already a multiple of 256."""
    for length in (2, 3, 40):
        assert plan_memory(LinkedProgram(_chain(length), [f"v{length}"]), LIMITS).arena_bytes == 2 * 9 * 32 * 8
    assert plan_memory(LinkedProgram(_chain(1), ["v1"]), LIMITS).arena_bytes == 9 * 32 * 8
    assert plan_memory(LinkedProgram(_chain(5), [f"v{i}" for i in range(1, 6)]), LIMITS).arena_bytes == 5 * 9 * 32 * 8
    assert plan_memory(LinkedProgram(_chain(3, rows=0), ["v3"]), LIMITS).arena_bytes == 0


def test_places_are_aligned() -> None:
    """Kernels may use aligned vector loads: every buffer starts at a multiple of 256 bytes."""
    bundle = {
        "inputs": ["a"], "outputs": ["x", "y", "z"], "kernels": {},
        "code": [*(["empty", n, [1, 3], [3, 1], "int64"] for n in "xyz"),
                 *(["op", "aten::mul.out", [{"t": "a"}, 2], {"out": {"t": n}}] for n in "xyz")],
    }  # fmt: skip
    linked = LinkedProgram([PieceCall(bundle, ["in"], ["x", "y", "z"])], ["x", "y", "z"])
    plan = plan_memory(linked, LIMITS)
    assert plan.arena_bytes == 3 * 256
    arena = torch.zeros(plan.arena_bytes, dtype=torch.uint8)
    bound = bind(linked, plan, {"in": torch.tensor([[1, 2, 3]])}, arena, FakeKernels(), {"T": 1, "S": 1}, MEMORY)
    for _, launches in bound.parts[""]:
        for launch in launches:
            launch()
    offsets = {bound.results[n].data_ptr() - arena.data_ptr() for n in "xyz"}
    assert offsets == {0, 256, 512}
    assert [bound.results[n].tolist() for n in "xyz"] == [[[2, 4, 6]]] * 3


def test_call_instructions_copy_fresh_results() -> None:
    bundle = {
        "inputs": ["a"], "outputs": ["v", "i"], "kernels": {},
        "code": [["empty", "v", ["T"], [1], "float32"], ["empty", "i", ["T"], [1], "int64"],
                 ["call", ["v", "i"], "aten::max.dim", [{"t": "a"}, 1], {}]],
    }  # fmt: skip
    linked = LinkedProgram([PieceCall(bundle, ["in"], ["best", "where"])], ["best", "where"])
    plan = plan_memory(linked, LIMITS)
    arena = torch.zeros(plan.arena_bytes, dtype=torch.uint8)
    given = torch.tensor([[1.0, 5.0, 2.0], [7.0, 0.0, 1.0]])
    bound = bind(linked, plan, {"in": given}, arena, FakeKernels(), {"T": 2, "S": 1}, MEMORY)
    for _, launches in bound.parts[""]:
        for launch in launches:
            launch()
    assert bound.results["best"].tolist() == [5.0, 7.0]
    assert bound.results["where"].tolist() == [1, 0]


def test_zeroed_scratch_is_one_buffer_outside_the_arena() -> None:
    """All kernels of a step count in the same place, for which the largest of them sets the size."""

    def counts(count: int | str) -> dict[str, Any]:
        code = [["zeroed", "z", count], ["view", "y", "z", [2], [1], 0], ["empty", "o", ["T"], [1], "int64"],
                ["kernel", "k", [["t", "y"], ["t", "a"], ["t", "o"]]]]  # fmt: skip
        return {"inputs": ["a"], "outputs": ["o"], "kernels": {"k": {}}, "code": code}

    calls = [PieceCall(counts("8 * S"), ["in"], ["x"]), PieceCall(counts(5), ["x"], ["y"])]
    linked = LinkedProgram(calls, ["y"])
    plan = plan_memory(linked, LIMITS)
    assert plan.zeroed == 8 * LIMITS["S"]
    assert plan_memory(LinkedProgram(_chain(1), ["v1"]), LIMITS).zeroed == 0
    seen: list[list[int]] = []

    class Kernels:
        def bind(self, kernel: Any, name: str, arguments: Any) -> Any:
            seen.append(list(arguments))
            return lambda: None

    zeros, arena = torch.zeros(plan.zeroed, dtype=torch.int32), torch.zeros(plan.arena_bytes, dtype=torch.uint8)
    bind(
        linked,
        plan,
        {"in": torch.zeros(2, dtype=torch.int64), "zeroed": zeros},
        arena,
        Kernels(),
        {"T": 2, "S": 1},
        MEMORY,
    )
    assert [arguments[0] for arguments in seen] == [zeros.data_ptr()] * 2
    assert seen[0][2] == seen[1][1]


def test_interpreted_pieces_are_segments_of_their_own() -> None:
    """CUDA graphs are captured between them: they must not be in a segment with anything else."""
    plain = _chain(1)[0].bundle
    double = {"inputs": [["int64", ["T", 32], [32, 1]]], "nodes": [["aten::mul.Tensor", [{"v": 0}, 2], {}]],
              "outputs": [{"v": 1}], "made": [["int64", ["T", 32], [32, 1]]]}  # fmt: skip
    kept = {"inputs": ["a"], "outputs": ["b"], "kernels": {}, "ir": double,
            "code": [["empty", "b", ["T", 32], [32, 1], "int64"], ["ir", ["a"], ["b"]]]}  # fmt: skip
    calls = [
        PieceCall(plain, ["v0"], ["v1"]),
        PieceCall(kept, ["v1"], ["v2"]),
        PieceCall(kept, ["v2"], ["v3"]),
        PieceCall(plain, ["v3"], ["v4"]),
    ]
    linked = LinkedProgram(calls, ["v1", "v3"])
    plan = plan_memory(linked, LIMITS)
    arena = torch.zeros(plan.arena_bytes, dtype=torch.uint8)
    bound = bind(
        linked, plan, {"v0": torch.ones(2, 32, dtype=torch.int64)}, arena, FakeKernels(), {"T": 2, "S": 1}, MEMORY
    )
    assert [(safe, len(launches)) for safe, launches in bound.parts[""]] == [(True, 1), (False, 2), (True, 1)]
    for _, launches in bound.parts[""]:
        for launch in launches:
            launch()
    assert torch.equal(bound.results["v3"], 4 * bound.results["v1"])


def test_unknown_instruction() -> None:
    bundle = {"inputs": [], "outputs": [], "code": [["teleport", [], []]], "kernels": {}}
    with pytest.raises(ValueError, match="does not know the piece instruction 'teleport'; recompile"):
        LinkedProgram([PieceCall(bundle, [], [])], [])
