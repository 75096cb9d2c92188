"""fuse_moe: experts end with the sum with the residual and, where an implementation takes it, begin with their norm."""

from __future__ import annotations

from graphllm.config import CompileConfig
from graphllm.ops.moe.fused_moe import fused_moe
from graphllm.ops.norms.rms_norm import rms_norm
from graphllm.rewrite import PassReport, Unit, bound, is_implemented, register_pass, sum_with
from graphllm.weights.plan.plan import WeightPlan


@register_pass(numerics="reorders")
def fuse_moe(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Turn the sum of a residual and `fused_moe` into a `fused_moe` with a residual where an implementation takes it.

    A norm that another op reads as well is computed by both, for which a single row is what pays: fuse_linear, which
    comes after, then has a norm of one reader.
    """
    notes: list[str] = []
    for node in list(unit.graph.nodes):
        given = bound(node, fused_moe)
        add, residual = sum_with(node)
        if given is None or add is None or given["residual_TD"] is not None:
            continue
        arguments = {**given, "residual_TD": residual}
        x = arguments["x_TD"]
        norm = bound(x, rms_norm)
        if norm is not None and not norm["offset"]:
            normed = arguments | {"x_TD": norm["x"], "norm_D": norm["weight"], "eps": norm["eps"]}
            if is_implemented(unit, config, fused_moe, **normed):
                notes.append(f"{unit.replace(add, fused_moe, **normed).name}: norm, experts, residual")
                continue
        if is_implemented(unit, config, fused_moe, **arguments):
            notes.append(f"{unit.replace(add, fused_moe, **arguments).name}: experts, residual")
    return PassReport(len(notes), tuple(notes))
