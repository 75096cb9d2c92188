"""Triton kernels on their way into an artifact: traced, written down by Inductor, taken apart, built for sm_90; see
triton_calls.py."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graphllm.ops.moe.fused_moe import fused_moe
from graphllm.program.expr import value
from tests.waiting import PATIENCE

pytestmark = pytest.mark.thorough

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    native = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    native["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    program = Path(__file__).with_name("triton_calls.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=PATIENCE, env=native)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_what_is_built_is_the_kernel_that_triton_starts(seen: dict[str, Any]) -> None:
    """With integers that it takes for constants, for multiples of 16, and for more than 32 bits."""
    assert seen["as started"] == [True] * 5


def test_a_launch_is_one_instruction_between_what_is_compiled(seen: dict[str, Any]) -> None:
    launches = [code for code in seen["apart"]["code"] if code[0] == "kernel"]
    assert [name.split("_")[0] for _, name, _ in launches] == ["fused", "shift", "fused"]
    (_, _, first), (_, name, given), (_, _, last) = launches
    kernel = seen["apart"]["kernels"][name]
    by_name = dict(zip(kernel["names"], given, strict=True))
    assert by_name["x_ptr"] in first  # it reads what the kernel before it wrote
    assert by_name["out_ptr"] in last  # and writes what the one behind it reads
    assert [by_name[n] for n in ("T", "count", "wide", "by")] == [["i", "T"], ["i", 5], ["i", 2**40], 0.5]
    assert [value(by_name[n][1], {"T": 200}) for n in kernel["grid"]] == [4, 2, 1]


def test_a_kernel_is_described_as_a_launch_hands_over_its_arguments(seen: dict[str, Any]) -> None:
    """None and constants are no arguments of the compiled kernel; the grid is none of the function."""
    (kernel,) = seen["apart"]["kernels"].values()
    kinds = dict(zip(kernel["names"], kernel["args"], strict=True))
    assert kinds == {
        "x_ptr": "ptr", "y_ptr": "ptr", "T": "i32", "count": "i32", "wide": "i64", "by": "f32", "turned": "u8",
        "out_ptr": "ptr", "grid_x": None, "grid_y": None, "grid_z": None,
    }  # fmt: skip
    assert bytes.fromhex(kernel["cubin"]) == b"\x7fELF"
    assert (kernel["warps"], kernel["early"], kernel["scratch"]) == (2, False, 0)


def test_what_tuning_compiled_is_found_again(seen: dict[str, Any]) -> None:
    """And serves the next bucket, whose sizes are others."""
    assert seen["found again"] == {"decode-2-16": [1, 0], "decode-17-32": [0, 0]}


@pytest.mark.parametrize(
    ("name", "T"), [("triton_one", 1), ("triton_few", 2), ("triton_few", 7), ("triton_sorted", 40)]
)
def test_a_bundle_gives_what_its_op_gives(seen: dict[str, Any], name: str, T: int) -> None:
    """Run by Triton's interpreter, of sizes that the bundle was not made at."""
    made = torch.Generator().manual_seed(T)
    x, gate_up, down = (
        (torch.randn(*shape, generator=made) / scale).to(torch.bfloat16)
        for *shape, scale in ((T, 64, 1), (20, 96, 64, 8), (20, 64, 48, 7))
    )
    weights = torch.rand(T, 2, generator=made)
    experts = torch.stack([torch.randperm(20, generator=made)[:2] for _ in range(T)]).to(torch.int32)
    given = (x, gate_up, down, weights, experts)
    (found,) = _run(seen["experts"][name], given, T)
    torch.testing.assert_close(found, fused_moe.reference(*given), rtol=2e-2, atol=2e-2)


def _run(bundle: Mapping[str, Any], inputs: Sequence[Tensor], T: int) -> list[Tensor]:
    """The outputs of a bundle of nothing but launches."""
    sizes = {"T": T, "S": T, "R": T}
    tensors = dict(zip(bundle["inputs"], inputs, strict=True))

    def evaluated(argument: Any) -> Any:
        kind, what = argument if isinstance(argument, list) else ("float", argument)
        return tensors[what] if kind == "t" else value(what, sizes) if kind == "i" else what

    for kind, name, *rest in bundle["code"]:
        if kind == "empty":
            shape, stride = ([value(d, sizes) for d in dims] for dims in rest[:2])
            tensors[name] = torch.empty_strided(shape, stride, dtype=getattr(torch, rest[2]))
        elif kind == "zeroed":
            tensors[name] = torch.zeros(value(rest[0], sizes), dtype=torch.int32)
        elif kind == "view":
            shape, stride = ([value(d, sizes) for d in dims] for dims in rest[1:3])
            tensors[name] = tensors[rest[0]].as_strided(shape, stride, value(rest[3], sizes))
        else:
            assert kind == "kernel"
            path, names, fixed = bundle["kernels"][name]
            module, _, function = path.rpartition(".")
            named = dict(zip(names, map(evaluated, rest[0]), strict=True))
            grid = tuple(named.pop(n) for n in names[-3:])
            kernel = getattr(importlib.import_module(module), function)
            kernel[grid](**named, **fixed | ({"EMULATED": True} if "EMULATED" in fixed else {}))
    return [tensors[name] for name in bundle["outputs"]]


def test_a_kernel_that_is_defined_again_is_another_one(seen: dict[str, Any]) -> None:
    """As in a notebook."""
    first, second, third = seen["again"]
    assert first == third != second


def test_memory_for_descriptors_is_ours_after_a_kernel_of_inductor(seen: dict[str, Any]) -> None:
    """Which sets a function for all kernels, whose memory is that of the last launch, which may still run."""
    assert seen["asked"]


def test_launches_that_cannot_be_recorded(seen: dict[str, Any]) -> None:
    assert "not made by triton.jit only" in seen["refused"]["autotuned"]
    assert "is a number, a text or None" in seen["refused"]["a type"]


def test_a_size_as_a_constant_is_fixed(seen: dict[str, Any]) -> None:
    """Which lowering refuses, see test_specialize.py. A comparison of sizes, true in the whole bucket, fixes none."""
    size, comparison = seen["fixed"]
    assert "T = 512" in size
    assert not comparison
