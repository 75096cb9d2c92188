"""fuse_gate: a product with integer weights ends with the gate that is its only reader, so that its halves, of all the
rows of a long step, are never written."""

from __future__ import annotations

from graphllm.config import CompileConfig
from graphllm.ir.op import op_of
from graphllm.ops.activations.swiglu import swiglu
from graphllm.ops.gemm.gguf_linear import gguf_linear
from graphllm.ops.gemm.quant_linear import quant_linear
from graphllm.rewrite import PassReport, Unit, is_implemented, register_pass
from graphllm.weights.plan.plan import WeightPlan


@register_pass(numerics="reorders")
def fuse_gate(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Give `gguf_linear` and `quant_linear` the `swiglu` after them where an implementation takes it."""
    notes: list[str] = []
    for gate in list(unit.graph.nodes):
        if op_of(gate.target) is not swiglu:
            continue
        (product,) = gate.all_input_nodes
        op = op_of(product.target)
        if op not in (gguf_linear, quant_linear) or len(product.users) != 1:
            continue
        arguments = {**op.bind(product.args, product.kwargs), "gated": True}
        if is_implemented(unit, config, op, **arguments):
            notes.append(f"{unit.replace(gate, op, **arguments).name}: gate")
    return PassReport(len(notes), tuple(notes))
