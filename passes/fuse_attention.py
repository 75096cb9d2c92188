"""fuse_attention: norm and rotation of queries and keys become part of attention, which reads them anyway."""

from __future__ import annotations

from typing import Any

import torch

from graphllm.compile.passes import PassReport, Stage, Unit, register_pass
from graphllm.config import CompileConfig
from graphllm.ir.graph import eliminate_dead
from graphllm.ir.op import Op, op_of
from graphllm.ops.paged_attention import paged_attention
from graphllm.ops.rms_norm import rms_norm
from graphllm.ops.rope import rope
from graphllm.ops.rope_attention import rope_attention
from graphllm.weights.plan import WeightPlan


@register_pass(stage=Stage.FUSE, numerics="reorders")
def fuse_attention(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Replace paged_attention(rope(rms_norm(q)), rope(rms_norm(k))) by `rope_attention`; the norms are optional.

    Only for compiled GPU targets, whose kernels take it. Queries and keys must have the same tables and nobody else may
    read what disappears.
    """
    notes: list[str] = []
    if config.target.device == "cuda" and config.backend == "inductor":
        for node in list(unit.graph.nodes):
            if op_of(node.target) is not paged_attention:
                continue
            turned = _turned(paged_attention.bind(node.args, node.kwargs))
            if turned is not None:
                with unit.graph.inserting_before(node):
                    made = unit.graph.call_function(rope_attention.overload, kwargs=turned)
                made.meta["val"] = node.meta["val"]
                node.replace_all_uses_with(made)
                unit.graph.erase_node(node)
                notes.append(f"{made.name}: rotation" + (" and norm" if turned["q_norm_E"] is not None else ""))
    eliminate_dead(unit.graph, keep_inputs=True)
    return PassReport(len(notes), tuple(notes))


def _turned(given: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of `rope_attention` that say the same, or None."""
    q_turn, k_turn = _inner(given["q_THE"], rope), _inner(given["k_TKE"], rope)
    if q_turn is None or k_turn is None:
        return None
    tables = {name: q_turn[name] for name in ("cos_TF", "sin_TF")}
    if any(k_turn[name] is not table or table.meta["val"].dtype != torch.float32 for name, table in tables.items()):
        return None
    q, k = q_turn["x_THE"], k_turn["x_THE"]
    norms = {"q_norm_E": None, "k_norm_E": None, "eps": 0.0}
    q_norm, k_norm = _inner(q, rms_norm), _inner(k, rms_norm)
    if q_norm and k_norm and q_norm["eps"] == k_norm["eps"] and q_norm["offset"] == k_norm["offset"] == 0.0:
        q, k = q_norm["x"], k_norm["x"]
        norms = {"q_norm_E": q_norm["weight"], "k_norm_E": k_norm["weight"], "eps": q_norm["eps"]}
    return given | {"q_THE": q, "k_TKE": k} | tables | norms


def _inner(node: torch.fx.Node, op: Op) -> dict[str, Any] | None:
    """The arguments of the op that makes a value, if it is that op and the value is read once."""
    if op_of(node.target) is not op or len(node.users) != 1:
        return None
    return op.bind(node.args, node.kwargs)
