"""Relatives of Llama with experts as feed-forward layers: Mixtral, Qwen2-MoE (with a gated expert that all tokens
share), Qwen3-MoE and OLMoE. Some layers may be dense."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from graphllm.config.fields import raw, switch, whole
from graphllm.ir import ForwardContext, StateSpec, Weight, register_model
from graphllm.model_defs import llama
from graphllm.model_defs.common import HF, experts_per_token, extended, head_dim, only, single_experts
from graphllm.ops.activations.swiglu import swiglu
from graphllm.ops.gemm.linear import linear
from graphllm.ops.moe.fused_moe import fused_moe
from graphllm.ops.moe.moe_route import moe_route
from graphllm.ops.norms.rms_norm import rms_norm

# What stands in for the attention of each architecture, and where its experts lie in a layer.
_LIKE = {"Mixtral": "Mistral", "Qwen2Moe": "Qwen2", "Qwen3Moe": "Qwen3", "Olmoe": "Llama"}
# What the files of each leave out, where it differs from that.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None},
    "Qwen2Moe": {"num_key_value_heads": 16},
    "Qwen3Moe": {"num_key_value_heads": 4},
    "Olmoe": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
}


@dataclass(frozen=True)
class Config(llama.Config):
    """N experts of width F_expert, A of them for each token. Layer types are Llama's; one with experts ends with
    "_sparse"."""

    N: int = 0
    A: int = 0
    F_expert: int = 0
    F_shared: int = 0  # of the expert that all tokens share, 0 for none
    renormalize: bool = True
    mixtral: bool = False  # what Mixtral's checkpoints call things


def from_hf(hf: HF, like: str = "") -> Config:
    """The config of any of the family's ``config.json``. like: as in `llama.from_hf`. Raises ConfigError for settings
    that are not supported."""
    name = like or hf["architectures"][0].removesuffix("ForCausalLM")
    mixtral, olmoe = name == "Mixtral", name == "Olmoe"
    hf = _DEFAULTS[name] | dict(hf)
    only(hf, "clip_qkv", None)
    only(hf, "qkv_bias", True, None)
    window = raw(hf, "sliding_window") or None  # 0 is none, too
    dense = llama.from_hf({**hf, "sliding_window": window, "head_dim": head_dim(hf)}, _LIKE[name])
    N = whole(hf, "num_local_experts" if "num_local_experts" in hf else "num_experts")
    A = experts_per_token(hf, N)
    every, plain = whole(hf, "decoder_sparse_step", 1), raw(hf, "mlp_only_layers") or ()
    types = (
        f"{kind}_sparse" if i not in plain and (i + 1) % every == 0 else kind
        for i, kind in enumerate(dense.layer_types)
    )
    return extended(
        Config,
        dense,
        layer_types=tuple(types),
        qk_norm="row" if olmoe else dense.qk_norm,
        N=N,
        A=A,
        F_expert=dense.F if mixtral or olmoe else whole(hf, "moe_intermediate_size"),
        F_shared=whole(hf, "shared_expert_intermediate_size") if name == "Qwen2Moe" else 0,
        renormalize=mixtral or switch(hf, "norm_topk_prob", False),
        mixtral=mixtral,
    )


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    if not sparse(layer_type):
        return llama.layer_weights(c, layer_type)
    return llama.attention_weights(c) | expert_weights(c)


def expert_weights(c: Config) -> dict[str, Weight]:
    """The weights of a layer's experts."""
    moe = llama.LAYER + ("block_sparse_moe." if c.mixtral else "mlp.")
    gate, up, down = ("w1", "w3", "w2") if c.mixtral else ("gate_proj", "up_proj", "down_proj")

    weights = {
        "router": Weight((c.N, c.D), (moe + "gate.weight",), exact=True),
        "gate_up": single_experts(moe + "experts.", (gate, up), c.N, c.F_expert, c.D, "output"),
        "down": single_experts(moe + "experts.", (down,), c.N, c.D, c.F_expert, "input"),
    }
    if c.F_shared:
        shared = llama.mlp_weights(moe + "shared_expert.", c.F_shared, c.D)
        weights |= {f"shared_{name}": weight for name, weight in shared.items()}
        gates = (moe + "gate.weight", moe + "shared_expert_gate.weight")  # one product for both
        weights["router"] = Weight((c.N + 1, c.D), gates, (c.N, 1), exact=True)
    return weights


def states(c: Config, layer_type: str) -> tuple[StateSpec, ...]:
    return llama.states(c, attention_type(layer_type))


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    if not sparse(layer_type):
        return llama.layer(c, layer_type, w, x_TD, ctx)
    h_TD = rms_norm(x_TD, w.attn_norm, c.eps)
    x_TD = x_TD + llama.attend(c, attention_type(layer_type), w, h_TD, ctx)
    return x_TD + experts(c, w, rms_norm(x_TD, w.ffn_norm, c.eps))


def experts(c: Config, w: SimpleNamespace, h_TD: Tensor) -> Tensor:
    """The experts of a layer, from normalized rows to what is added to the stream."""
    logits_TN, share_TC = linear(h_TD, w.router).split((c.N, 1 if c.F_shared else 0), 1)
    weights_TA, experts_TA = moe_route(logits_TN, c.A, renormalize=c.renormalize)
    out_TD = fused_moe(h_TD, w.gate_up, w.down, weights_TA, experts_TA)
    if c.F_shared:
        shared_TD = linear(swiglu(linear(h_TD, w.shared_gate_up)), w.shared_down)
        out_TD = out_TD + torch.sigmoid(share_TC) * shared_TD
    return out_TD


def attention_type(layer_type: str) -> str:
    """Llama's type of layer, which says what attention it has."""
    return layer_type.removesuffix("_sparse")


def sparse(layer_type: str) -> bool:
    """Whether layers of the type have experts."""
    return layer_type.endswith("_sparse")


GRAPH = replace(llama.GRAPH, layer_weights=layer_weights, layer=layer, states=states)
MODEL = register_model(
    replace(
        llama.MODEL,
        architectures=("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM"),
        config=from_hf,
        graphs=(GRAPH,),
        shardable=("H", "K", "F", "F_expert", "F_shared"),
        of_experts=("F_expert",),
    )
)
