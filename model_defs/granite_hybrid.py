"""Granite's hybrids: layers of Mamba2 and of attention, each with a dense feed-forward part and perhaps experts beside
it, and Granite's scales."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

from torch import Tensor

from graphllm.config import ConfigError
from graphllm.config.fields import number, raw, strings, switch, whole
from graphllm.ir import ForwardContext, StateSpec, Weight, register_model
from graphllm.model_defs import granite, llama, mamba2
from graphllm.model_defs.common import HF, check_plain, extended, layer_types_of, only
from graphllm.ops.activations.swiglu import swiglu
from graphllm.ops.embeddings.embedding import embedding
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.rms_norm import rms_norm

_TYPES = {"mamba": "mamba2", "linear_attention": "mamba2", "attention": "full", "full_attention": "full"}


@dataclass(frozen=True)
class Config(granite.Config):
    """mixer: of the layers of type "mamba2"; F_shared: width of the dense part; rotary: attention knows positions."""

    mixer: mamba2.Mixer | None = None
    F_shared: int = 0
    rotary: bool = False


def from_hf(hf: HF) -> Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    check_plain(hf)
    L, D = whole(hf, "num_hidden_layers", 32), whole(hf, "hidden_size", 4096)
    types = strings(hf, "layer_types") or strings(hf, "layers_block_type") or ("mamba",) * L
    N = whole(hf, "num_local_experts", 8, 0, ge=0)
    dense = llama.from_hf({"rms_norm_eps": 1e-6, **hf, "layer_types": None}, "Llama")
    return extended(
        Config,
        dense,
        layer_types=layer_types_of(types, L, _TYPES),
        scale=number(hf, "attention_multiplier", 1.0),
        N=N,
        A=whole(hf, "num_experts_per_tok", 2) if N else 0,
        embed_scale=number(hf, "embedding_multiplier", 1.0),
        residual_scale=number(hf, "residual_multiplier", 1.0),
        logits_divisor=number(hf, "logits_scaling", 1.0),
        mixer=mixer_of(hf, D, dense.eps),
        F_shared=whole(hf, "shared_intermediate_size", 1024),
        rotary=only(hf, "position_embedding_type", None, "nope", "rope") == "rope",
    )


def mixer_of(hf: HF, D: int, eps: float) -> mamba2.Mixer:
    """The recurrent part, by the names that hybrids have for its fields."""
    H, G, bias = whole(hf, "mamba_n_heads", 128), whole(hf, "mamba_n_groups", 1), switch(hf, "mamba_proj_bias", False)
    inner, given = whole(hf, "mamba_expand", 2) * D, raw(hf, "mamba_d_head", "auto")
    inner = whole(hf, "mamba_d_ssm", inner, inner)
    P = inner // H if given in ("auto", None) else whole(hf, "mamba_d_head")
    if inner != H * P or H % G:
        raise ConfigError(
            f"config.json: mamba_n_heads {H} of mamba_d_head {P} in {G} groups do not make the {inner} numbers of "
            "mamba_d_ssm, or of mamba_expand times hidden_size; correct one of them"
        )
    return mamba2.Mixer(
        D=D, H=H, P=P, G=G, N=whole(hf, "mamba_d_state", 256), E=inner // G,
        W=whole(hf, "mamba_d_conv", 4, ge=2), bias=bias, out_bias=switch(hf, "projectors_bias", bias),
        conv_bias=switch(hf, "mamba_conv_bias", True), eps=eps, limits=mamba2.time_step_limits(hf),
    )  # fmt: skip


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    shared = llama.LAYER + "shared_mlp."
    weights = {
        "shared_gate_up": Weight(
            (2 * c.F_shared, c.D), (shared + "input_linear.weight",), (c.F_shared,) * 2, shard="output"
        ),
        "shared_down": Weight((c.D, c.F_shared), (shared + "output_linear.weight",), shard="input"),
    }
    if c.N:
        weights |= granite.expert_weights(c)
    attention = llama.attention_weights(c)
    if layer_type == "full":
        return attention | weights
    norms = {name: attention[name] for name in ("attn_norm", "ffn_norm")}
    assert c.mixer is not None
    return norms | mamba2.mixer_weights(c.mixer, llama.LAYER + "mamba.") | weights


def states(c: Config, layer_type: str) -> tuple[StateSpec, ...]:
    assert c.mixer is not None
    return mamba2.mixer_states(c.mixer) if layer_type == "mamba2" else llama.states(c, layer_type)


def embed_weights(c: Config) -> dict[str, Weight]:
    weights = llama.embed_weights(c)
    return weights if c.rotary else {"tokens": weights["tokens"]}


def embed(c: Config, w: SimpleNamespace, ctx: ForwardContext) -> tuple[Tensor, tuple[Tensor, ...]]:
    if c.rotary:
        return llama.embed(c, w, ctx, c.embed_scale)
    return embedding(ctx.inputs.token_ids, w.tokens, c.embed_scale), ()


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    h_TD = rms_norm(x_TD, w.attn_norm, c.eps)
    assert c.mixer is not None
    mixed_TD = mamba2.mix(c.mixer, w, h_TD, ctx) if layer_type == "mamba2" else llama.attend(c, "full", w, h_TD, ctx)
    x_TD = x_TD + c.residual_scale * mixed_TD
    h_TD = rms_norm(x_TD, w.ffn_norm, c.eps)
    out_TD = linear(swiglu(linear(h_TD, w.shared_gate_up)), w.shared_down)
    if c.N:
        out_TD = granite.experts(c, w, h_TD) + out_TD
    return x_TD + c.residual_scale * out_TD


register_model(
    replace(
        llama.MODEL,
        architectures=("GraniteMoeHybridForCausalLM",),
        config=from_hf,
        graphs=(
            replace(
                llama.GRAPH, embed_weights=embed_weights, layer_weights=layer_weights, embed=embed, layer=layer,
                head=granite.head, states=states,
            ),
        ),
        shardable=("H", "K", "F", "F_shared", *mamba2.SHARDABLE),
        shared=("K", *mamba2.SHARED),
        of_experts=("F",),
    )
)  # fmt: skip
