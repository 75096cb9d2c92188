"""fuse_attention: norm and rotation of queries and keys become part of attention, which reads them anyway."""

from __future__ import annotations

from typing import Any

from graphllm.config import CompileConfig
from graphllm.ops.attention.paged_attention import paged_attention
from graphllm.ops.attention.rope import rope
from graphllm.ops.norms.rms_norm import rms_norm
from graphllm.rewrite import PassReport, Unit, bound, bound_once, is_implemented, register_pass
from graphllm.weights.plan.plan import WeightPlan


@register_pass(numerics="reorders")
def fuse_attention(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Replace paged_attention(rope(rms_norm(q)), rope(rms_norm(k))) by one `paged_attention` that rotates;
    the norms are optional.

    Only where an implementation takes it. Queries and keys must have the same tables and nobody else may read what
    disappears.
    """
    notes: list[str] = []
    for node in list(unit.graph.nodes):
        given = bound(node, paged_attention)
        rotary = None if given is None else _rotary(given)
        if rotary is not None and is_implemented(unit, config, paged_attention, **rotary):
            made = unit.replace(node, paged_attention, **rotary)
            notes.append(f"{made.name}: rotation" + (" and norm" if rotary["q_norm_E"] is not None else ""))
    return PassReport(len(notes), tuple(notes))


def _rotary(given: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of a `paged_attention` that rotates and says the same, or None."""
    q_rope, k_rope = bound_once(given["q_THE"], rope), bound_once(given["k_TKE"], rope)
    if given["cos_TF"] is not None or q_rope is None or k_rope is None:
        return None
    if q_rope["interleaved"] or k_rope["interleaved"]:
        return None
    tables = {name: q_rope[name] for name in ("cos_TF", "sin_TF")}
    if (
        any(k_rope[name] is not table for name, table in tables.items())
        or q_rope["interleaved"]
        or k_rope["interleaved"]
    ):
        return None
    q, k = q_rope["x_THE"], k_rope["x_THE"]
    norms = {"q_norm_E": None, "k_norm_E": None, "eps": 0.0}
    q_norm, k_norm = bound_once(q, rms_norm), bound_once(k, rms_norm)
    if q_norm and k_norm and q_norm["eps"] == k_norm["eps"] and q_norm["offset"] == k_norm["offset"] == 0.0:
        q, k = q_norm["x"], k_norm["x"]
        norms = {"q_norm_E": q_norm["weight"], "k_norm_E": k_norm["weight"], "eps": q_norm["eps"]}
    return given | {"q_THE": q, "k_TKE": k} | tables | norms
