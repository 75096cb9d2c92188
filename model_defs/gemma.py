"""Gemma 2 (capped scores and logits) and Gemma 3 (normalized q and k, local layers with their own frequencies)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from graphllm.config.fields import MOST, number, raw, section, strings, switch, whole
from graphllm.ir import ForwardContext, Graph, StateSpec, Weight, register_model, select_rows
from graphllm.model_defs import llama
from graphllm.model_defs.common import (
    HF,
    LARGEST_HEAD,
    MOST_LAYERS,
    check_plain,
    heads,
    layer_types_of,
    only,
    split_heads,
    token_table,
)
from graphllm.ops.activations.geglu import geglu
from graphllm.ops.activations.soft_cap import soft_cap
from graphllm.ops.attention.paged_attention import kv_state, paged_attention
from graphllm.ops.attention.rope import rope
from graphllm.ops.attention.rope_table import Rope
from graphllm.ops.embeddings.embedding import embedding
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.rms_norm import rms_norm

_GELU = {"gelu_pytorch_tanh": "tanh", "gelu": "none"}
_COMMON = {"num_attention_heads": 8, "num_key_value_heads": 4}
# Published files leave out what equals the class's defaults.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Gemma2ForCausalLM": {
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        "max_position_embeddings": 8192,
    },
    "Gemma3ForCausalLM": {
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1e6,
        "final_logit_softcapping": None,
    },
}


@dataclass(frozen=True)
class Config(llama.Sizes):
    embed_scale: float
    score_cap: float
    logit_cap: float
    gelu: str
    rope: Rope
    local_rope: Rope | None  # None: local layers use the same frequencies
    qk_norm: bool
    tied: bool


def from_hf(hf: HF) -> Config:
    """The config of either ``config.json``. Raises ConfigError for settings that are not supported."""
    check_plain(hf)
    architecture = hf["architectures"][0]
    gemma3 = architecture == "Gemma3ForCausalLM"
    hf = _COMMON | _DEFAULTS[architecture] | dict(hf)
    only(hf, "attention_bias", False)
    only(hf, "use_bidirectional_attention", False, None)
    D, L = whole(hf, "hidden_size"), whole(hf, "num_hidden_layers", le=MOST_LAYERS)
    (H, K), E = heads(hf), whole(hf, "head_dim", 256, le=LARGEST_HEAD)
    global_rope = Rope.from_hf(hf, E, "full_attention" if gemma3 else None)
    pattern = whole(hf, "sliding_window_pattern", 6) if gemma3 else 2
    alternating = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(L)]
    return Config(
        D=D,
        H=H,
        K=K,
        E=E,
        F=whole(hf, "intermediate_size"),
        V=whole(hf, "vocab_size"),
        max_len=max(whole(hf, "max_position_embeddings", le=MOST), global_rope.max_len),
        layer_types=layer_types_of(strings(hf, "layer_types") or alternating, L),
        window=whole(hf, "sliding_window", 4096, le=MOST),
        eps=number(hf, "rms_norm_eps", 1e-6, ge=0, le=1),
        scale=whole(hf, "query_pre_attn_scalar", 256) ** -0.5,
        embed_scale=D**0.5,
        score_cap=0.0 if gemma3 else number(hf, "attn_logit_softcapping", null=0.0, gt=0, le=1e6),
        logit_cap=number(hf, "final_logit_softcapping", null=0.0, gt=0, le=1e6),
        gelu=_GELU[only(hf, "hidden_activation", *_GELU)],
        rope=global_rope,
        local_rope=_local_rope(hf, E) if gemma3 else None,
        qk_norm=gemma3,
        tied=switch(hf, "tie_word_embeddings", True),
    )


def _local_rope(hf: HF, E: int) -> Rope:
    """Gemma 3's local layers: the newer nested parameters, else an own base that ``rope_scaling`` does not touch."""
    nested = section(section(hf, "rope_parameters"), "sliding_attention")
    own = {"rope_scaling": None, "rope_parameters": nested, "rope_theta": raw(hf, "rope_local_base_freq", 1e4)}
    return Rope.from_hf(dict(hf) | own, E)


def embed_weights(c: Config) -> dict[str, Weight]:
    weights = {"tokens": token_table(c, "model.embed_tokens.weight"), "inv_freq": c.rope.weight()}
    return weights | ({"inv_freq_local": c.local_rope.weight()} if c.local_rope else {})


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    hf = llama.LAYER
    parts = (c.H * c.E, c.K * c.E, c.K * c.E)
    weights = {
        "attn_norm": Weight((c.D,), (hf + "input_layernorm.weight",)),
        "qkv": llama.merged("q k v", hf + "self_attn.", parts, c.D, heads=(c.H, c.K, c.K)),
        "o": Weight((c.D, c.H * c.E), (hf + "self_attn.o_proj.weight",), shard="input"),
        "attn_post_norm": Weight((c.D,), (hf + "post_attention_layernorm.weight",)),
        "ffn_norm": Weight((c.D,), (hf + "pre_feedforward_layernorm.weight",)),
        "gate_up": llama.merged("gate up", hf + "mlp.", (c.F, c.F), c.D),
        "down": Weight((c.D, c.F), (hf + "mlp.down_proj.weight",), shard="input"),
        "ffn_post_norm": Weight((c.D,), (hf + "post_feedforward_layernorm.weight",)),
    }
    if c.qk_norm:
        weights["q_norm"] = Weight((c.E,), (hf + "self_attn.q_norm.weight",))
        weights["k_norm"] = Weight((c.E,), (hf + "self_attn.k_norm.weight",))
    return weights


def states(c: Config, layer_type: str) -> tuple[StateSpec, ...]:
    return (kv_state(c.K, c.E, c.window if layer_type == "sliding" else 0),)


def embed(c: Config, w: SimpleNamespace, ctx: ForwardContext) -> tuple[Tensor, tuple[Tensor, ...]]:
    shared: tuple[Tensor, ...] = c.rope.table(ctx.inputs.positions, w.inv_freq)
    if c.local_rope:
        shared += c.local_rope.table(ctx.inputs.positions, w.inv_freq_local)
    return embedding(ctx.inputs.token_ids, w.tokens, c.embed_scale), shared


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, c.eps, 1.0)

    q_THE, k_TKE, v_TKE = split_heads(linear(norm(x_TD, w.attn_norm), w.qkv), c.H, c.K, c.E)
    if c.qk_norm:
        q_THE, k_TKE = norm(q_THE, w.q_norm), norm(k_TKE, w.k_norm)
    angles = ctx.shared[-2:] if layer_type == "sliding" else ctx.shared[:2]
    q_THE, k_TKE = rope(q_THE, *angles), rope(k_TKE, *angles)
    window = c.window if layer_type == "sliding" else 0
    a_THE = paged_attention(q_THE, k_TKE, v_TKE, ctx.state.kv, *ctx.attn, c.scale, window, c.score_cap)
    x_TD = x_TD + norm(linear(a_THE.flatten(1), w.o), w.attn_post_norm)
    h_TF = geglu(linear(norm(x_TD, w.ffn_norm), w.gate_up), c.gelu)
    return x_TD + norm(linear(h_TF, w.down), w.ffn_post_norm)


def norm(c: Config, w: SimpleNamespace, x_TD: Tensor) -> Tensor:
    return rms_norm(x_TD, w.norm, c.eps, 1.0)


def head(c: Config, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    x_RD = select_rows(x_TD, ctx.inputs.logits_indices)
    logits_RV = linear(norm(c, w, x_RD), w.lm_head)
    return soft_cap(logits_RV, c.logit_cap) if c.logit_cap else logits_RV


GRAPH = Graph(
    lambda c: c.layer_types, embed_weights, layer_weights, llama.head_weights, embed, layer, head, states, norm=norm
)
register_model(
    replace(llama.MODEL, architectures=("Gemma2ForCausalLM", "Gemma3ForCausalLM"), config=from_hf, graphs=(GRAPH,))
)
