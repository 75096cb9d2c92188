"""Nemotron-H: layers of Mamba2, of attention without positions, and of a feed-forward part or experts with squared
ReLU, one norm each.

A sigmoid and a correction choose experts, which may work on fewer numbers than the model's width (a latent). An expert
that all tokens share stands beside them. Source: NVIDIA 2025, Nemotron-H and Nemotron 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn.functional import relu

from graphllm.config import ConfigError
from graphllm.config.fields import MOST, number, raw, strings, switch, whole
from graphllm.ir import ForwardContext, Graph, Model, StateSpec, Weight, register_model
from graphllm.model_defs import mamba2
from graphllm.model_defs.common import (
    HF,
    check_plain,
    experts_per_token,
    heads,
    named_too,
    only,
    single_experts,
    split_heads,
)
from graphllm.model_defs.llama import merged
from graphllm.ops.attention.paged_attention import kv_state, paged_attention
from graphllm.ops.gemm.linear import linear
from graphllm.ops.moe.fused_moe import fused_moe
from graphllm.ops.moe.moe_route import moe_route
from graphllm.ops.norms.rms_norm import rms_norm

_LAYER = "backbone.layers.{layer}."
_TYPES = {
    "linear_attention": "mamba2", "mamba": "mamba2", "full_attention": "full", "attention": "full", "mlp": "mlp",
    "M": "mamba2", "*": "full", "-": "mlp", "E": "moe", "moe": "moe",
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """D width, H query heads, K key/value heads of E, F feed-forward width, V vocabulary. Of layers with experts: N of
    width F_expert, A of them for each token, from the best kept_groups of ``groups``; F_shared of the one that all
    tokens share; latent: numbers that the others work on, 0 for D."""

    D: int
    H: int
    K: int
    E: int
    F: int
    V: int
    max_len: int
    eps: float
    tied: bool
    mlp_bias: bool
    layer_types: tuple[str, ...]  # "mamba2", "full", "mlp" or "moe"
    mixer: mamba2.Mixer
    N: int = 0
    A: int = 0
    F_expert: int = 0
    F_shared: int = 0
    latent: int = 0
    groups: int = 1
    kept_groups: int = 1
    renormalize: bool = True
    routed_scale: float = 1.0


def from_hf(hf: HF) -> Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    check_plain(hf)
    only(hf, "mlp_hidden_act", "relu2")
    only(hf, "mamba_hidden_act", "silu")
    only(hf, "attention_bias", False)
    only(hf, "sliding_window", None)
    D, (H, K), eps = whole(hf, "hidden_size", 4096), heads(hf), number(hf, "layer_norm_epsilon", 1e-5, ge=0, le=1)
    bias, G = switch(hf, "use_bias", False), whole(hf, "n_groups", 8)
    count, P = whole(hf, "mamba_num_heads", 128), whole(hf, "mamba_head_dim", 64)
    mixer = mamba2.Mixer(
        D=D, H=count, P=P, G=G, N=whole(hf, "ssm_state_size", 128), E=count * P // G,
        W=whole(hf, "conv_kernel", 4, ge=2), bias=bias, out_bias=bias,
        conv_bias=switch(hf, "use_conv_bias", True), eps=eps, limits=mamba2.time_step_limits(hf),
    )  # fmt: skip
    if count % G:
        raise ConfigError(f"config.json: mamba_num_heads is {count}, no multiple of n_groups {G}; change one of them")
    types = _layer_types(hf)
    return Config(
        D=D,
        H=H,
        K=K,
        E=whole(hf, "head_dim", 128),
        F=whole(hf, "intermediate_size", 21504),
        V=whole(hf, "vocab_size", 131072),
        max_len=whole(hf, "max_position_embeddings", 4096, le=MOST),
        eps=eps,
        tied=switch(hf, "tie_word_embeddings", False),
        mlp_bias=switch(hf, "mlp_bias", False),
        layer_types=types,
        mixer=mixer,
        **(_routing(hf) if "moe" in types else {}),
    )


def _routing(hf: HF) -> dict[str, Any]:
    """The fields of Config that are of experts."""
    only(hf, "n_shared_experts", 1)
    N, groups = whole(hf, "n_routed_experts", 8), whole(hf, "n_group", 1)
    if N % groups or (groups > 1 and 2 * groups > N):
        raise ConfigError(
            f"config.json: n_group is {groups}; {N} experts (n_routed_experts) do not make so many groups of two and "
            "more; correct one of them"
        )
    kept = whole(hf, "topk_group", 1, le=groups)
    return {
        "N": N,
        "A": experts_per_token(hf, kept * (N // groups), 2),
        "F_expert": whole(hf, "moe_intermediate_size", 7688),
        "F_shared": whole(hf, "moe_shared_expert_intermediate_size", 7688),
        "latent": whole(hf, "moe_latent_size", 0, 0),
        "groups": groups,
        "kept_groups": kept,
        "renormalize": switch(hf, "norm_topk_prob", True),
        "routed_scale": number(hf, "routed_scaling_factor", 1.0, gt=0),
    }


def _layer_types(hf: HF) -> tuple[str, ...]:
    pattern = raw(hf, "hybrid_override_pattern")
    given = strings(hf, "layers_block_type") or strings(hf, "layer_types") or tuple(pattern or ())
    types = tuple(_TYPES.get(name, name) for name in given)
    for name, known in zip(given, types, strict=True):
        if known not in ("mamba2", "full", "mlp", "moe"):
            raise ConfigError(
                f"config.json: a layer is of the type {name!r}, which is not supported; use a checkpoint with layers "
                "of Mamba2, attention, feed-forward parts and experts"
            )
    if not types:
        raise ConfigError("config.json: layers_block_type is missing; give the type of each layer")
    return types


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    # Adapters have transformers' names.
    return named_too(_layer_weights(c, layer_type), _LAYER, "model.layers.{layer}.")


def _layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    mixer, norm = _LAYER + "mixer.", {"norm": Weight((c.D,), (_LAYER + "norm.weight",))}
    if layer_type == "mamba2":
        return norm | mamba2.mixer_weights(c.mixer, mixer)
    if layer_type == "full":
        parts = (c.H * c.E, c.K * c.E, c.K * c.E)
        return norm | {
            "qkv": merged("q k v", mixer, parts, c.D, heads=(c.H, c.K, c.K)),
            "o": Weight((c.D, c.H * c.E), (mixer + "o_proj.weight",), shard="input"),
        }
    if layer_type == "moe":
        return norm | _expert_weights(c, mixer) | _dense_weights(c, mixer + "shared_experts.", c.F_shared)
    return norm | _dense_weights(c, mixer, c.F)


def _dense_weights(c: Config, of: str, F: int) -> dict[str, Weight]:
    """A feed-forward part of width F; ``of``: what its tensors' names begin with."""
    weights = {
        "up": Weight((F, c.D), (of + "up_proj.weight",), shard="output"),
        "down": Weight((c.D, F), (of + "down_proj.weight",), shard="input"),
    }
    if c.mlp_bias:
        weights["up_bias"] = Weight((F,), (of + "up_proj.bias",), shard="output")
        weights["down_bias"] = Weight((c.D,), (of + "down_proj.bias",))
    return weights


def _expert_weights(c: Config, of: str) -> dict[str, Weight]:
    inner = c.latent or c.D
    weights = {
        "router": Weight((c.N, c.D), (of + "gate.weight",), exact=True, dtype="float32"),
        "correction": Weight((c.N,), (of + "gate.e_score_correction_bias",), dtype="float32"),
        "expert_up": single_experts(of + "experts.", ("up_proj",), c.N, c.F_expert, inner, "output"),
        "expert_down": single_experts(of + "experts.", ("down_proj",), c.N, inner, c.F_expert, "input"),
    }
    for name, part, shape in (("to_latent", "fc1", (inner, c.D)), ("from_latent", "fc2", (c.D, inner))):
        if c.latent:
            weights[name] = Weight(shape, (f"{of}{part}_latent_proj.weight",))
        if c.latent and c.mlp_bias:
            weights[f"{name}_bias"] = Weight(shape[:1], (f"{of}{part}_latent_proj.bias",))
    return weights


def states(c: Config, layer_type: str) -> tuple[StateSpec, ...]:
    return {"mamba2": mamba2.mixer_states(c.mixer), "full": (kv_state(c.K, c.E),)}.get(layer_type, ())


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    h_TD = rms_norm(x_TD, w.norm, c.eps)
    if layer_type == "mamba2":
        return x_TD + mamba2.mix(c.mixer, w, h_TD, ctx)
    if layer_type == "full":
        q_THE, k_TKE, v_TKE = split_heads(linear(h_TD, w.qkv), c.H, c.K, c.E)
        a_THE = paged_attention(q_THE, k_TKE, v_TKE, ctx.state.kv, *ctx.attn, c.E**-0.5)
        return x_TD + linear(a_THE.flatten(1), w.o)
    up_TF = relu(linear(h_TD, w.up, getattr(w, "up_bias", None))).square()
    out_TD = linear(up_TF, w.down, getattr(w, "down_bias", None))
    return x_TD + (out_TD + experts(c, w, h_TD) if layer_type == "moe" else out_TD)


def experts(c: Config, w: SimpleNamespace, h_TD: Tensor) -> Tensor:
    """The experts of a layer but the shared one, from normalized rows to what is added to the stream.

    They are chosen in float32.
    """
    logits_TN = linear(h_TD.to(w.router.dtype), w.router)
    weights_TA, experts_TA = moe_route(
        logits_TN, c.A, "sigmoid", c.renormalize, c.routed_scale, c.groups, c.kept_groups, w.correction
    )
    if c.latent:
        h_TD = linear(h_TD, w.to_latent, getattr(w, "to_latent_bias", None))
    out_TD = fused_moe(h_TD, w.expert_up, w.expert_down, weights_TA, experts_TA, "relu2")
    return linear(out_TD, w.from_latent, getattr(w, "from_latent_bias", None)) if c.latent else out_TD


GRAPH = Graph(
    layer_types=lambda c: c.layer_types,
    embed_weights=mamba2.embed_weights,
    layer_weights=layer_weights,
    head_weights=mamba2.head_weights,
    embed=mamba2.embed,
    layer=layer,
    head=mamba2.head,
    states=states,
    norm=mamba2.norm,
)
MODEL = register_model(
    Model(
        architectures=("NemotronHForCausalLM",), config=from_hf, graphs=(GRAPH,),
        shardable=("H", "K", "F", "F_expert", "F_shared", *mamba2.SHARDABLE), shared=("K", *mamba2.SHARED),
        of_experts=("F_expert",),
    )
)  # fmt: skip
