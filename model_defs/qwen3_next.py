"""Qwen3-Next: three of four layers are gated delta nets, the others attend with a gate of their results; experts.

Queries, keys, values and output gates of a delta net are stored by key head; here they are sorted once, when weights
are loaded. Source: Qwen Team 2025, Qwen3-Next; Yang et al. 2024, "Gated Delta Networks".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from graphllm.config import ConfigError
from graphllm.config.fields import MOST, number, raw, strings, switch, whole
from graphllm.ir import ForwardContext, StateSpec, Weight, register_model, select_rows
from graphllm.model_defs import llama, moe
from graphllm.model_defs.common import (
    HF,
    LARGEST_HEAD,
    MOST_LAYERS,
    by_turns,
    check_plain,
    experts_per_token,
    heads,
    layer_types_of,
    only,
)
from graphllm.ops.attention.paged_attention import kv_state, paged_attention
from graphllm.ops.attention.rope import rope
from graphllm.ops.attention.rope_table import Rope
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.gated_rms_norm import gated_rms_norm
from graphllm.ops.norms.rms_norm import rms_norm
from graphllm.ops.recurrent.causal_conv import causal_conv
from graphllm.ops.recurrent.gated_delta import gated_delta
from graphllm.ops.recurrent.slots import Slots
from graphllm.weights.plan.expr import Each, Read, Reshape

_KEY_EPS = 1e-6  # under the root that queries and keys of a delta net are divided by
_LAYER_TYPES = {"full_attention": "full", "linear_attention": "linear"}
# What files leave out.
_DEFAULTS: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25,
}


@dataclass(frozen=True)
class Config(moe.Config):
    """A delta net has G heads of queries and keys of K_delta numbers, and H_delta, a multiple, of values of V_delta.
    taps: inputs that its convolution weighs. eps_delta: of its norm. most_beta: the largest share of a value that is
    replaced; with 2 a key may change the sign of what it stands for."""

    G: int = 0
    H_delta: int = 0
    K_delta: int = 0
    V_delta: int = 0
    taps: int = 0
    eps_delta: float = 1e-6
    most_beta: float = 1.0

    @property
    def parts(self) -> tuple[int, int, int]:
        """Channels of queries, keys and values of a delta net."""
        return self.G * self.K_delta, self.G * self.K_delta, self.H_delta * self.V_delta


def from_hf(hf: HF, dense: bool = True) -> Config:
    """The config of a ``config.json``. dense: whether the family has layers without experts. Raises ConfigError for
    settings that are not supported."""
    check_plain(hf)
    hf = _DEFAULTS | dict(hf)
    only(hf, "hidden_act", "silu")
    only(hf, "use_sliding_window", False)
    (H, K), E = heads(hf), whole(hf, "head_dim", 256, le=LARGEST_HEAD)
    N = whole(hf, "num_experts", 512, ge=0)
    rope_settings = Rope.from_hf(hf, E, partly=True)
    G, H_delta = whole(hf, "linear_num_key_heads", 16), whole(hf, "linear_num_value_heads", 32)
    if H_delta % G:
        raise ConfigError(
            f"config.json: linear_num_key_heads is {G}, no divisor of linear_num_value_heads = {H_delta}; "
            "correct one of them"
        )
    bias, eps = switch(hf, "attention_bias", False), number(hf, "rms_norm_eps", 1e-6, ge=0, le=1)
    return Config(
        D=whole(hf, "hidden_size"),
        H=H,
        K=K,
        E=E,
        F=whole(hf, "intermediate_size") if dense else 0,
        V=whole(hf, "vocab_size"),
        max_len=max(whole(hf, "max_position_embeddings", le=MOST), rope_settings.max_len),
        layer_types=_layer_types(hf, N),
        window=0,
        eps=eps,
        scale=E**-0.5,
        rope=rope_settings,
        tied=switch(hf, "tie_word_embeddings", False),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        N=N,
        A=experts_per_token(hf, N, 10) if N else 0,
        F_expert=whole(hf, "moe_intermediate_size", 512),
        F_shared=whole(hf, "shared_expert_intermediate_size", 512),
        renormalize=switch(hf, "norm_topk_prob", True),
        G=G,
        H_delta=H_delta,
        K_delta=whole(hf, "linear_key_head_dim", 128, le=LARGEST_HEAD),
        V_delta=whole(hf, "linear_value_head_dim", 128, le=LARGEST_HEAD),
        taps=whole(hf, "linear_conv_kernel_dim", 4, ge=2, le=64),
        eps_delta=eps,
    )


def _layer_types(hf: HF, N: int) -> tuple[str, ...]:
    """ "full" or "linear", followed by "_sparse" where the layer has experts."""
    L, period = whole(hf, "num_hidden_layers", le=MOST_LAYERS), whole(hf, "full_attention_interval", 4)
    usual = tuple("linear_attention" if (i + 1) % period else "full_attention" for i in range(L))
    kinds = strings(hf, "layer_types") or usual
    types = layer_types_of(kinds, L, _LAYER_TYPES)
    every, plain = whole(hf, "decoder_sparse_step", 1), raw(hf, "mlp_only_layers") or ()
    return tuple(
        kind + ("_sparse" if N and i not in plain and (i + 1) % every == 0 else "") for i, kind in enumerate(types)
    )


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    norms = {
        "attn_norm": _norm(c, llama.LAYER + "input_layernorm.weight"),
        "ffn_norm": _norm(c, llama.LAYER + "post_attention_layernorm.weight"),
    }
    mixer = _delta_weights(c) if _linear(layer_type) else _attention_weights(c)
    if moe.sparse(layer_type):
        return mixer | norms | moe.expert_weights(c)
    return mixer | norms | llama.mlp_weights(llama.LAYER + "mlp.", c.F, c.D)


def _norm(c: Config, name: str) -> Weight:
    """Files have what is added to one."""
    return Weight((c.D,), expr=Each("+1", Read((name,), (c.D,))), dtype="float32")


def _attention_weights(c: Config) -> dict[str, Weight]:
    """Llama's, but for twice as many rows of queries: those of each head are followed by its gate's."""
    attn, parts, kinds = llama.LAYER + "self_attn.", (2 * c.H * c.E, c.K * c.E, c.K * c.E), (c.H, c.K, c.K)
    weights = {**llama.attention_weights(c), "qkv": llama.merged("q k v", attn, parts, c.D, heads=kinds)}
    if c.qkv_bias:
        weights["qkv_bias"] = llama.merged("q k v", attn, parts, heads=kinds)
    return weights


def _delta_weights(c: Config) -> dict[str, Weight]:
    delta, share = llama.LAYER + "linear_attn.", c.H_delta // c.G
    key_rows, value_rows, kinds = c.K_delta, share * c.V_delta, (c.G, c.G, c.H_delta)
    by_head = Weight((c.H_delta,), dtype="float32", shard="output", heads=(c.H_delta,))
    q, k, v = c.parts
    stored, numbers = Read((delta + "A_log",), (c.H_delta,)), (delta + "dt_bias",)
    return {
        "qkvz": Weight(
            (q + k + 2 * v, c.D), (), (q, k, v, v), shard="output", heads=(*kinds, c.H_delta),
            expr=by_turns(delta + "in_proj_qkvz.weight", c.G, (key_rows, key_rows, value_rows, value_rows), c.D),
        ),
        "beta_gate": Weight(
            (2 * c.H_delta, c.D), (), (c.H_delta, c.H_delta), shard="output", heads=(c.H_delta, c.H_delta),
            expr=by_turns(delta + "in_proj_ba.weight", c.G, (share, share), c.D),
        ),
        "conv": Weight(
            (q + k + v, c.taps), (), (q, k, v), shard="output", heads=kinds, exact=True,
            expr=Reshape(Read((delta + "conv1d.weight",), (q + k + v, 1, c.taps)), (q + k + v, c.taps)),
        ),
        "rate": replace(by_head, expr=Each("-exp", stored)),
        "gate_bias": replace(by_head, sources=numbers),
        "delta_norm": Weight((c.V_delta,), (delta + "norm.weight",)),
        "o": Weight((c.D, v), (delta + "out_proj.weight",), shard="input"),
    }  # fmt: skip


def states(c: Config, layer_type: str) -> tuple[StateSpec, ...]:
    if not _linear(layer_type):
        return (kv_state(c.K, c.E),)
    return (
        StateSpec("conv", "slot", (c.taps - 1, sum(c.parts)), retention="last"),
        StateSpec("delta", "slot", (c.H_delta, c.V_delta, c.K_delta), "recurrent", "last", int8_over=-2),
    )


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    mix = delta_net if _linear(layer_type) else attend
    x_TD = x_TD + mix(c, w, rms_norm(x_TD, w.attn_norm, c.eps), ctx)
    h_TD = rms_norm(x_TD, w.ffn_norm, c.eps)
    return x_TD + (moe.experts(c, w, h_TD) if moe.sparse(layer_type) else llama.mlp(w, h_TD))


def attend(c: Config, w: SimpleNamespace, h_TD: Tensor, ctx: ForwardContext) -> Tensor:
    """Attention whose results are gated, from normalized rows to what is added to the stream."""
    qkv_TO = linear(h_TD, w.qkv, getattr(w, "qkv_bias", None))
    queries, keys, values = qkv_TO.split((2 * c.H * c.E, c.K * c.E, c.K * c.E), 1)
    q_THE, gate_THE = queries.unflatten(1, (c.H, 2 * c.E)).split(c.E, -1)
    k_TKE, v_TKE = (x.unflatten(1, (c.K, c.E)) for x in (keys, values))
    q_THE, k_TKE = rms_norm(q_THE, w.q_norm, c.eps, 1.0), rms_norm(k_TKE, w.k_norm, c.eps, 1.0)
    q_THE, k_TKE = rope(q_THE, *ctx.shared), rope(k_TKE, *ctx.shared)
    a_THE = paged_attention(q_THE, k_TKE, v_TKE, ctx.state.kv, *ctx.attn, scale=c.scale)
    return linear((a_THE * torch.sigmoid(gate_THE)).flatten(1), w.o, getattr(w, "o_bias", None))


def delta_net(c: Config, w: SimpleNamespace, h_TD: Tensor, ctx: ForwardContext) -> Tensor:
    """A gated delta net, from normalized rows to what is added to the stream."""
    at = Slots.of(ctx.inputs)
    mixed, z = linear(h_TD, w.qkvz).split((sum(c.parts), c.parts[2]), 1)
    beta_TH, gate_TH = linear(h_TD, w.beta_gate).float().chunk(2, 1)
    q, k, v = causal_conv(mixed, w.conv, ctx.state.conv, at, exports=ctx.inputs.exports).split(c.parts, 1)
    q_TGK, k_TGK = (x.unflatten(1, (c.G, c.K_delta)) for x in (q, k))
    v_THV = v.unflatten(1, (c.H_delta, c.V_delta))
    g_TH = w.rate * torch.nn.functional.softplus(gate_TH + w.gate_bias)
    beta_TH = torch.sigmoid(beta_TH) if c.most_beta == 1 else c.most_beta * torch.sigmoid(beta_TH)
    o_THV = gated_delta(
        q_TGK, k_TGK, v_THV, g_TH, beta_TH, ctx.state.delta, at, c.K_delta**-0.5, _KEY_EPS, ctx.inputs.exports
    )
    return linear(gated_rms_norm(o_THV.flatten(1), z, w.delta_norm, c.H_delta, c.eps_delta, gate_first=False), w.o)


def norm(c: Config, w: SimpleNamespace, x_TD: Tensor) -> Tensor:
    return rms_norm(x_TD, w.norm, c.eps, 1.0)


def head(c: Config, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    return linear(norm(c, w, select_rows(x_TD, ctx.inputs.logits_indices)), w.lm_head)


def _linear(layer_type: str) -> bool:
    return layer_type.startswith("linear")


GRAPH = replace(llama.GRAPH, layer_weights=layer_weights, layer=layer, head=head, states=states, norm=norm)
MODEL = register_model(
    replace(
        moe.MODEL,
        architectures=("Qwen3NextForCausalLM",),
        config=from_hf,
        graphs=(GRAPH,),
        shardable=(*moe.MODEL.shardable, "G", "H_delta"),
    )
)
