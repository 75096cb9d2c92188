"""fuse_gate: the gate joins products with integer weights; near misses stay; results are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphllm.compile.trace import trace_unit
from graphllm.config import Bucket, CompileConfig, Target
from graphllm.ir.graph import Shapes, TensorSpec, target_name
from graphllm.ir.registry import load_ops
from graphllm.ops.encodings.gguf_blocks import TILED
from graphllm.passes.fuse_gate import fuse_gate
from graphllm.weights.encodings import encoding_of
from graphllm.weights.plan.plan import WeightPlan

OPS = load_ops()
CPU, ONE, MANY = CompileConfig(Target("cpu", ())), Bucket("decode", 1, 1), Bucket("mixed", 2, 512)
dense = TensorSpec.contiguous
D, F = 64, 48
VALUES, SCALES = (p.shape(2 * F, D) for p in encoding_of("int8").parts)
SPECS = {
    "x": dense("bfloat16", "T", D), "bias": dense("bfloat16", 2 * F), "values": dense("int8", *VALUES),
    "scales": dense("bfloat16", *SCALES), "tiles": dense("uint8", 2 * F // 16, D // 32, 16 * TILED["q8_0"].nbytes),
}  # fmt: skip
Values = dict[str, Any]
Fn = Callable[[Values], tuple[Tensor, ...]]
swiglu = OPS["swiglu"]


def _packed(v: Values, rows: int = 2 * F) -> Any:
    return OPS["quant_linear"](v["x"], v["values"], v["scales"], rows, v["bias"][:rows])


def _tiled(v: Values) -> Any:
    return OPS["gguf_linear"](v["x"], v["tiles"], "q8_0", 2 * F)


def _targets(fn: Fn, bucket: Bucket, config: CompileConfig = CPU) -> tuple[torch.fx.Graph, list[str]]:
    unit = trace_unit("piece", SPECS, fn, Shapes("cpu", bucket))._replace(bucket=bucket)
    fuse_gate(unit, WeightPlan(()), config)
    names = [target_name(n.target) for n in unit.graph.nodes if n.op == "call_function"]
    return unit.graph, [name.removeprefix("graphllm::") for name in names if name.startswith("graphllm::")]


@pytest.mark.parametrize("bucket", [ONE, MANY])
@pytest.mark.parametrize(("product", "name"), [(_packed, "quant_linear"), (_tiled, "gguf_linear")])
def test_a_gate_joins(product: Callable[[Values], Any], name: str, bucket: Bucket) -> None:
    def layer(v: Values) -> tuple[Tensor, ...]:
        return (swiglu(product(v)),)

    graph, targets = _targets(layer, bucket)
    assert targets == [name]
    draw = torch.Generator().manual_seed(0)
    values: Values = {
        label: torch.randn([bucket.lo if d == "T" else d for d in spec.shape], generator=draw).bfloat16()
        for label, spec in SPECS.items()
        if spec.dtype == "bfloat16"
    }
    values["values"] = torch.randint(-127, 128, VALUES, generator=draw, dtype=torch.int8)
    values["tiles"] = torch.randint(0, 60, SPECS["tiles"].shape, generator=draw, dtype=torch.uint8)  # finite scales
    arguments = [values[n.meta["label"]] for n in graph.find_nodes(op="placeholder")]
    (found,) = torch.fx.Interpreter(torch.fx.GraphModule(torch.nn.Module(), graph)).run(*arguments)
    torch.testing.assert_close(found, layer(values)[0], atol=0, rtol=0)


@pytest.mark.parametrize(
    ("fn", "bucket", "config"),
    [
        (lambda v: (swiglu(y := _packed(v)), y), MANY, CPU),
        (lambda v: (swiglu(_packed(v, 2 * F - 16)),), MANY, CPU),
        (lambda v: (swiglu(_packed(v)),), MANY, CompileConfig(Target("cuda", ("sm_90",)))),
        (lambda v: (OPS["geglu"](_packed(v)),), MANY, CPU),
    ],
    ids=["read twice", "halves end inside a block", "another device", "another gate"],
)
def test_near_misses(fn: Fn, bucket: Bucket, config: CompileConfig) -> None:
    assert len(_targets(fn, bucket, config)[1]) == 2
