"""Zamba2: layers of Mamba2. Before some of them a block of attention and a feed-forward part reads their input beside
the embeddings of the tokens, and its result joins what Mamba2 reads.

These layers take turns with a few such blocks, whose weights they share; each adds products of low rank of its own.
Source: Glorioso et al. 2024, "The Zamba2 Suite".
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from graphllm.config import ConfigError
from graphllm.config.fields import MOST, number, strings, switch, whole
from graphllm.ir import ForwardContext, Graph, Model, StateSpec, Weight, register_model, select_rows
from graphllm.model_defs import llama, mamba2
from graphllm.model_defs.common import HF, check_plain, head_matrix, heads, only, split_heads, token_table
from graphllm.ops.activations.geglu import geglu
from graphllm.ops.attention.paged_attention import kv_state, paged_attention
from graphllm.ops.attention.rope import rope
from graphllm.ops.attention.rope_table import Rope
from graphllm.ops.embeddings.embedding import embedding
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.rms_norm import rms_norm

_MIXER_EPS = 1e-5
_TYPES = {"mamba": "mamba2", "linear_attention": "mamba2", "hybrid": "hybrid"}


@dataclass(frozen=True)
class Config:
    """D width, H query heads, K key/value heads of E, F feed-forward width, V vocabulary.

    layer_types: "mamba2", or "hybrid_" and the number of the layer among those with a block.
    hybrids: which layers these are.
    blocks: how many blocks there are.
    rank: of a layer's own products.
    adapted: whether queries, keys and values have such products, too.
    rope: None where attention knows no positions.
    """

    D: int
    H: int
    K: int
    E: int
    F: int
    V: int
    max_len: int
    eps: float
    tied: bool
    bias: bool
    layer_types: tuple[str, ...]
    hybrids: tuple[int, ...]
    blocks: int
    rank: int
    adapted: bool
    rope: Rope | None
    mixer: mamba2.Mixer


def from_hf(hf: HF) -> Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    check_plain(hf)
    only(hf, "hidden_act", "gelu")
    only(hf, "use_long_context", False)
    D, (H, K), bias = whole(hf, "hidden_size", 2560), heads(hf), switch(hf, "add_bias_linear", False)
    adapted, types = switch(hf, "use_shared_attention_adapter", False), _layer_types(hf)
    if 2 * D % H or (adapted and K != H):
        raise ConfigError(
            f"config.json: num_attention_heads is {H} and num_key_value_heads {K}; heads divide twice the hidden_size, "
            f"{2 * D}, and are alike with use_shared_attention_adapter; correct them"
        )
    E, count, G = 2 * D // H, whole(hf, "n_mamba_heads", 8), whole(hf, "mamba_ngroups", 1)
    inner = whole(hf, "mamba_expand", 2) * D
    if inner % count or count % G:
        raise ConfigError(
            f"config.json: n_mamba_heads is {count}; it must divide mamba_expand times hidden_size, {inner}, and be a "
            f"multiple of mamba_ngroups, {G}; correct one of them"
        )
    hybrids = tuple(i for i, kind in enumerate(types) if kind == "hybrid")
    numbers = {i: n for n, i in enumerate(hybrids)}
    return Config(
        D=D,
        H=H,
        K=K,
        E=E,
        F=whole(hf, "intermediate_size", 4 * D, 4 * D),
        V=whole(hf, "vocab_size", 32000),
        max_len=whole(hf, "max_position_embeddings", 4096, le=MOST),
        eps=number(hf, "rms_norm_eps", 1e-5, ge=0, le=1),
        tied=bool(only(hf, "tie_word_embeddings", True)),  # without it transformers' blocks share nothing, either
        bias=bias,
        layer_types=tuple(f"hybrid_{numbers[i]}" if i in numbers else kind for i, kind in enumerate(types)),
        hybrids=hybrids,
        blocks=whole(hf, "num_mem_blocks", 1),
        rank=whole(hf, "adapter_rank", 128),
        adapted=adapted,
        rope=Rope.from_hf(hf, E) if switch(hf, "use_mem_rope", False) else None,
        mixer=mamba2.Mixer(
            D=D, H=count, P=inner // count, G=G, N=whole(hf, "mamba_d_state", 64), E=inner // G,
            W=whole(hf, "mamba_d_conv", 4, ge=2), bias=bias, out_bias=bias, conv_bias=True, eps=_MIXER_EPS,
            limits=mamba2.time_step_limits(hf),
        ),
    )  # fmt: skip


def _layer_types(hf: HF) -> tuple[str, ...]:
    given = strings(hf, "layers_block_type") or strings(hf, "layer_types")
    if not given or any(name not in _TYPES for name in given):
        raise ConfigError(
            f"config.json: layers_block_type is {list(given)[:80]}; give each layer's, {' or '.join(_TYPES)}"
        )
    return tuple(_TYPES[name] for name in given)


def embed_weights(c: Config) -> dict[str, Weight]:
    tokens = {"tokens": token_table(c, "model.embed_tokens.weight")}
    return tokens if c.rope is None else tokens | {"inv_freq": c.rope.weight()}


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    if layer_type == "mamba2":
        own, block = llama.LAYER, {}
    else:
        own, block = llama.LAYER + "mamba_decoder.", _block_weights(c, int(layer_type.removeprefix("hybrid_")))
    norm = {"norm": Weight((c.D,), (own + "input_layernorm.weight",))}
    return block | norm | mamba2.mixer_weights(c.mixer, own + "mamba.")


def _block_weights(c: Config, number: int) -> dict[str, Weight]:
    """What a layer reads of its block, which is stored with the first layer that has it, and what is its own."""
    first = c.hybrids[number % c.blocks]
    of = f"model.layers.{first}.shared_transformer."
    shared = _shared_weights(c, of)
    if number >= c.blocks:
        shared = {name: Weight(w.shape, tie=f"layers.{first}.{name}") for name, w in shared.items()}
    low = f"{of}feed_forward.gate_up_proj_adapter_list.{number}."
    own = {
        "linear": Weight((c.D, c.D), (llama.LAYER + "linear.weight",)),
        "gate_up_low": Weight((c.rank, c.D), (low + "0.weight",)),
        "gate_up_high": Weight((2 * c.F, c.rank), (low + "1.weight",), (c.F, c.F), shard="output"),
    }
    if c.adapted:
        lows = [f"{of}self_attn.linear_{name}_adapter_list.{number}." for name in "qkv"]
        ranks = (c.rank,) * 3
        own["qkv_low"] = Weight((3 * c.rank, 2 * c.D), tuple(name + "0.weight" for name in lows), ranks)
        for name, source in zip("qkv", lows, strict=True):
            own[f"{name}_high"] = Weight((c.H * c.E, c.rank), (source + "1.weight",), shard="output", heads=(c.H,))
    return shared | own


def _shared_weights(c: Config, of: str) -> dict[str, Weight]:
    attn, mlp, parts = of + "self_attn.", of + "feed_forward.", (c.H * c.E, c.K * c.E, c.K * c.E)
    weights = {
        "attn_norm": Weight((2 * c.D,), (of + "input_layernorm.weight",)),
        "qkv": llama.merged("q k v", attn, parts, 2 * c.D, heads=(c.H, c.K, c.K)),
        "o": Weight((c.D, c.H * c.E), (attn + "o_proj.weight",), shard="input"),
        "ffn_norm": Weight((c.D,), (of + "pre_ff_layernorm.weight",)),
        "gate_up": Weight((2 * c.F, c.D), (mlp + "gate_up_proj.weight",), (c.F, c.F), shard="output"),
        "down": Weight((c.D, c.F), (mlp + "down_proj.weight",), shard="input"),
    }
    if c.bias:
        weights["gate_up_bias"] = Weight((2 * c.F,), (mlp + "gate_up_proj.bias",), (c.F, c.F), shard="output")
        weights["down_bias"] = Weight((c.D,), (mlp + "down_proj.bias",))
    return weights


def head_weights(c: Config) -> dict[str, Weight]:
    return {"norm": Weight((c.D,), ("model.final_layernorm.weight",)), "lm_head": head_matrix(c)}


def states(c: Config, layer_type: str) -> tuple[StateSpec, ...]:
    attention = () if layer_type == "mamba2" else (kv_state(c.K, c.E),)
    return (*mamba2.mixer_states(c.mixer), *attention)


def embed(c: Config, w: SimpleNamespace, ctx: ForwardContext) -> tuple[Tensor, tuple[Tensor, ...]]:
    x_TD = embedding(ctx.inputs.token_ids, w.tokens)
    angles = () if c.rope is None else c.rope.table(ctx.inputs.positions, w.inv_freq)
    return x_TD, (x_TD, *angles)


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    h_TD = x_TD if layer_type == "mamba2" else x_TD + block(c, w, x_TD, ctx)
    return x_TD + mamba2.mix(c.mixer, w, rms_norm(h_TD, w.norm, c.eps), ctx)


def block(c: Config, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    """What a layer's block gives: [T, D]."""
    tokens_TD, *angles = ctx.shared
    h_T2D = rms_norm(torch.cat([x_TD, tokens_TD], 1), w.attn_norm, c.eps)
    qkv = linear(h_T2D, w.qkv)
    if c.adapted:
        lows = linear(h_T2D, w.qkv_low).split(c.rank, 1)
        highs = (w.q_high, w.k_high, w.v_high)
        qkv = qkv + torch.cat([linear(low, high) for low, high in zip(lows, highs, strict=True)], 1)
    q_THE, k_TKE, v_TKE = split_heads(qkv, c.H, c.K, c.E)
    if angles:
        q_THE, k_TKE = rope(q_THE, *angles), rope(k_TKE, *angles)
    a_THE = paged_attention(q_THE, k_TKE, v_TKE, ctx.state.kv, *ctx.attn, scale=(c.E / 2) ** -0.5)
    h_TD = rms_norm(linear(a_THE.flatten(1), w.o), w.ffn_norm, c.eps)
    own_T2F = linear(linear(h_TD, w.gate_up_low), w.gate_up_high)
    gate_up_T2F = linear(h_TD, w.gate_up, getattr(w, "gate_up_bias", None)) + own_T2F
    return linear(linear(geglu(gate_up_T2F, "none"), w.down, getattr(w, "down_bias", None)), w.linear)


def norm(c: Config, w: SimpleNamespace, x_TD: Tensor) -> Tensor:
    return rms_norm(x_TD, w.norm, c.eps)


def head(c: Config, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    return linear(norm(c, w, select_rows(x_TD, ctx.inputs.logits_indices)), w.lm_head)


GRAPH = Graph(
    lambda c: c.layer_types, embed_weights, layer_weights, head_weights, embed, layer, head, states, norm=norm
)
MODEL = register_model(
    Model(
        architectures=("Zamba2ForCausalLM",), config=from_hf, graphs=(GRAPH,),
        shardable=("H", "K", "F", *mamba2.SHARDABLE), shared=("K", *mamba2.SHARED),
    )
)  # fmt: skip
