"""Kernels in Gluon on their way into an artifact: traced, written down by Inductor, taken apart, built for sm_90."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("triton")

from graphllm.compile.codegen import inductor
from graphllm.compile.codegen.translate import Bundle, translate
from graphllm.config import Bucket
from graphllm.ir.graph import Shapes, TensorSpec
from graphllm.ops.attention.paged_attention.gluon_prefill import hopper_flash
from tests.waiting import PATIENCE

H, K, E, P, S = 4, 2, 64, 16, 3
CONSTANTS: dict[str, Any] = {
    "Q_ROW": H * E, "Q_HEAD": E, "CACHE_BLOCK": 2 * K * P * E, "CACHE_KV": K * P * E, "CACHE_HEAD": P * E,
    "CACHE_POS": E, "TABLE_ROW": 8, "SCALE": 0.125, "WINDOW": 0, "H": H, "K": K, "G": H // K, "E": E, "P": P,
    "BLOCK_N": 64, "RANGE": 0, "STAGES": 2, "F": 0, "NORM": False, "EPS": 0.0, "SINKS": False, "TURNS": True,
}  # fmt: skip
SPECS = {
    "q": TensorSpec.contiguous("bfloat16", "T", H, E),
    "cache": TensorSpec.contiguous("bfloat16", 9, 2, K, P, E),
    "table": TensorSpec.contiguous("int32", S, 8),
    "starts": TensorSpec.contiguous("int32", S + 1),
    "lengths": TensorSpec.contiguous("int32", S),
}


def _attend(q: Tensor, cache: Tensor, table: Tensor, starts: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
    scaled = q * 2
    out = torch.empty_like(scaled)
    items = (q.shape[0] // 64 + S) * K
    hopper_flash(7, scaled, cache, out, table, starts, lengths, *[q] * 4, S, items, 1, **CONSTANTS)
    return (out + 1,)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    shapes = Shapes("cpu", Bucket("mixed", 2, 512))
    fakes = [shapes.tensor(spec) for spec in SPECS.values()]
    with shapes.mode, torch.no_grad():
        graph = make_fx(_attend, decomposition_table=inductor.decompositions())(*fakes)
    return translate(inductor.generate(graph, fakes, shapes), fakes, shapes)


def test_a_launch_is_one_instruction_between_what_is_compiled(bundle: Bundle) -> None:
    launches = [code for code in bundle.code if code[0] == "kernel"]
    assert [name.split("_")[0] for _, name, _ in launches] == ["fused", "hopper", "fused"]
    (_, before, first), (_, name, given), (_, _, last) = launches
    assert bundle.kernels[name]["dtypes"]["q_ptr"] == "bfloat16"
    assert bundle.kernels[name]["gluon"] == "hopper_flash_kernel"
    assert before != name
    tensors, numbers = given[:10], given[10:]
    assert tensors[0] == first[1]  # it reads what the kernel before it wrote
    assert tensors[2] in last  # and writes what the one behind it reads
    assert numbers[0] == ["i", S]
    assert numbers[2:] == [["i", 1], ["i", 7]]
    T = 1000
    assert eval(str(numbers[1][1]), {"T": T}) == (T // 64 + S) * K


PROGRAM = """
import json, sys
import graphllm.ops.moe.fused_moe, graphllm.ops.attention.paged_attention
import triton
from graphllm.compile.codegen.cubins import TargetOnly, described_gluon
from graphllm.config import Target

target = Target("cuda", ("sm_90", "sms_132"))
triton.runtime.driver.set_active(TargetOnly(target))
made = described_gluon(json.load(sys.stdin), target)
print(json.dumps({**made, "cubin": made["cubin"][:4].hex()}))
"""


def _built(call: Mapping[str, Any]) -> dict[str, Any]:
    native = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(call),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=native,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    made: dict[str, Any] = json.loads(done.stdout)
    assert bytes.fromhex(made["cubin"]) == b"\x7fELF"
    return made


@pytest.mark.thorough
def test_a_kernel_is_built_with_what_a_launch_needs(bundle: Bundle) -> None:
    """In another process, as Triton's interpreter has replaced what kernels are made of in this one."""
    (call,) = (k for k in bundle.kernels.values() if "gluon" in k)
    made = _built(call)
    assert made["warps"] == 12  # two groups of four, one that loads, three that fill up its group
    assert made["scratch"] == 128  # the descriptor
    tiles = 2 * 2 * 64 * E * 2 + 128 * E * 2
    assert tiles <= made["shared"] < tiles + 1024
    assert made["names"][-4:] == ["S", "items", "few", "programs"]
    assert made["args"] == ["ptr"] * 10 + ["i32"] * 3 + [None]
    assert made["grid"] == ["programs", 1, 1]
    assert not made["early"]


@pytest.mark.thorough
def test_options_of_the_compiler_are_no_arguments() -> None:
    """And pointers may be to bytes."""
    constants = {
        "WEIGHT_ROW": 64, "ROWS": 192, "K": 160, "N": 4, "BIAS": False, "GATED": True, "ACTIVATION": "silu",
        "LIMIT": 0.0, "SLOTS": 8, "PARTS": 2, "STAGES": 2, "SPANS": 2, "TEAMS": 1, "REGISTERS": 0,
        "maxnreg": 128,
    }  # fmt: skip
    names = ("x", "weight", "scales", "bias", "weights", "table", "order", "out")
    dtypes = ("bfloat16", "int16", "uint8", "bfloat16", "float32", "int32", "int32", "bfloat16")
    made = _built(
        {
            "gluon": "hopper_experts_kernel",
            "dtypes": {f"{n}_ptr": d for n, d in zip(names, dtypes, strict=True)},
            "constants": json.dumps(constants),
        }
    )
    assert made["names"] == [*(f"{n}_ptr" for n in names), "programs"]
    assert (made["warps"], made["early"], made["scratch"]) == (8, True, 3 * 128)
