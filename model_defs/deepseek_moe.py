"""Experts as DeepSeek has them, beside some that all tokens share, which are one dense part; the first layers are
dense.

A sigmoid of each, and a correction that no weight contains, choose experts, in DeepSeek-V2 a softmax; both may choose
groups of experts first. Source: DeepSeek-AI 2024, DeepSeek-V2 and DeepSeek-V3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from graphllm.config import ConfigError
from graphllm.config.fields import number, strings, switch, whole
from graphllm.ir import Weight
from graphllm.model_defs import llama, moe
from graphllm.model_defs.common import HF, experts_per_token, layer_types_of, only
from graphllm.ops.activations.swiglu import swiglu
from graphllm.ops.gemm.linear import linear
from graphllm.ops.moe.fused_moe import fused_moe
from graphllm.ops.moe.moe_route import moe_route
from graphllm.ops.norms.rms_norm import rms_norm


@dataclass(frozen=True)
class Config(moe.Config):
    """F_shared: of all shared experts together.

    corrected: whether experts are chosen by a sigmoid and a correction, else by a softmax.
    groups: of neighbouring experts, 1 for none.
    kept_groups: groups that the experts of a token are chosen from.
    routed_scale: factor of what the chosen experts give.
    """

    corrected: bool = True
    groups: int = 1
    kept_groups: int = 1
    routed_scale: float = 1.0


def routing(hf: HF, corrected: bool = True) -> dict[str, Any]:
    """The fields of `Config` that are of experts. corrected: see there. Raises ConfigError for settings that are not
    supported."""
    methods = ("noaux_tc",) if corrected else ("greedy", "group_limited_greedy")
    # dots.llm1 has the method where the scoring belongs.
    only(hf, "scoring_func", *(("sigmoid", "noaux_tc") if corrected else ("softmax",)))
    N, groups = whole(hf, "n_routed_experts"), whole(hf, "n_group", 1, 1)
    kept = whole(hf, "topk_group", 1, 1, le=groups)
    if only(hf, "topk_method", *methods) == "greedy":
        groups = kept = 1
    if N % groups or (corrected and 1 < groups > N // 2):
        raise ConfigError(
            f"config.json: n_group is {groups}; {N} experts (n_routed_experts) do not make so many groups of "
            f"{'two and more' if corrected else 'equal size'}; correct one of them"
        )
    width = whole(hf, "moe_intermediate_size")
    return {
        "N": N,
        "A": experts_per_token(hf, kept * (N // groups)),
        "F_expert": width,
        "F_shared": width * whole(hf, "n_shared_experts", 0, 0, ge=0),
        "renormalize": switch(hf, "norm_topk_prob", True) if corrected else only(hf, "norm_topk_prob", False),
        "corrected": corrected,
        "groups": groups,
        "kept_groups": kept,
        "routed_scale": number(hf, "routed_scaling_factor", 1.0, gt=0),
    }


def layer_types(kinds: tuple[str, ...], hf: HF) -> tuple[str, ...]:
    """The types of layers whose attention is of these kinds: the first ones are dense, or those that the file lists."""
    only(hf, "moe_layer_freq", 1)
    first, L = whole(hf, "first_k_dense_replace", 0, 0, ge=0), len(kinds)
    usual = tuple("" if i < first else "_sparse" for i in range(L))
    listed = strings(hf, "mlp_layer_types")
    ends = layer_types_of(listed, L, {"dense": "", "sparse": "_sparse"}, "mlp_layer_types") if listed else usual
    return tuple(map("".join, zip(kinds, ends, strict=True)))


def weights(c: Config, layer_type: str) -> dict[str, Weight]:
    """Those of a layer's experts, or of its dense part, without the norm before it."""
    of = llama.LAYER + "mlp."
    if not moe.sparse(layer_type):
        return llama.mlp_weights(of, c.F, c.D)
    found = moe.expert_weights(replace(c, F_shared=0))
    found["router"] = replace(found["router"], dtype="float32")
    if c.corrected:
        found["correction"] = Weight((c.N,), (of + "gate.e_score_correction_bias",), dtype="float32")
    shared = llama.mlp_weights(of + "shared_experts.", c.F_shared, c.D) if c.F_shared else {}
    return found | {f"shared_{name}": weight for name, weight in shared.items()}


def feed_forward(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor) -> Tensor:
    """The part of a layer that follows its attention, with its norm."""
    h_TD = rms_norm(x_TD, w.ffn_norm, c.eps)
    return x_TD + (experts(c, w, h_TD) if moe.sparse(layer_type) else llama.mlp(w, h_TD))


def experts(c: Config, w: SimpleNamespace, h_TD: Tensor) -> Tensor:
    """The experts of a layer, from normalized rows to what is added to the stream. They are chosen in float32."""
    scoring, correction_N = ("sigmoid", w.correction) if c.corrected else ("softmax", None)
    logits_TN = linear(h_TD.to(w.router.dtype), w.router)
    route = moe_route(logits_TN, c.A, scoring, c.renormalize, c.routed_scale, c.groups, c.kept_groups, correction_N)
    out_TD = fused_moe(h_TD, w.gate_up, w.down, *route)
    return out_TD + linear(swiglu(linear(h_TD, w.shared_gate_up)), w.shared_down) if c.F_shared else out_TD
