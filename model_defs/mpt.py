"""MPT: GPT-2's layers without any bias, with ALiBi in place of learned positions, and clipped projections."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

from torch import Tensor

from graphllm.config.fields import READ, note, number, section, switch, whole
from graphllm.ir import ForwardContext, StateSpec, Weight, register_model, select_rows
from graphllm.model_defs import gpt2
from graphllm.model_defs.alibi import alibi_attention, alibi_state, position_channels, position_range, slope_weight
from graphllm.model_defs.common import (
    HF,
    MOST_LAYERS,
    also_named,
    check_plain,
    head_matrix,
    only,
    split_heads,
    token_table,
    widths,
)
from graphllm.ops.embeddings.embedding import embedding
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.layer_norm import layer_norm


@dataclass(frozen=True)
class Config(gpt2.Config):
    slopes: tuple[float, ...]  # of ALiBi: of all heads, also where H is a rank's share of them
    clip: float  # the largest magnitude of queries, keys and values, 0 for any


def from_hf(hf: HF) -> Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    check_plain(hf)
    hf = also_named(hf, d_model="hidden_size", n_heads="num_attention_heads", n_layers="num_hidden_layers")
    attention = {**section(hf, "attn_config"), READ: hf.get(READ, set())}
    note(hf, "learned_pos_emb")  # not where there is ALiBi
    only(hf, "no_bias", True)
    only(hf, "logit_scale", None)
    only(hf, "norm_type", "low_precision_layernorm", "layernorm")
    only(attention, "alibi", True)
    only(attention, "alibi_bias_max", 8)
    only(attention, "attn_type", "multihead_attention")
    for name in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        only(attention, name, False)
    D, H, E = widths(hf, "d_model", "n_heads", (2048, 16))
    return Config(
        D=D,
        H=H,
        K=H,
        E=E,
        F=D * whole(hf, "expansion_ratio", 4, le=64),
        V=whole(hf, "vocab_size", 50368),
        L=whole(hf, "n_layers", 24, le=MOST_LAYERS),
        max_len=position_range(hf, "max_seq_len", 2048),
        eps=number(hf, "layer_norm_epsilon", 1e-5, ge=0, le=1),
        scale=number(attention, "softmax_scale", E**-0.5, E**-0.5, gt=0),
        activation="gelu",
        tied=switch(hf, "tie_word_embeddings", True),
        slopes=_slopes(H),
        clip=number(attention, "clip_qkv", 0.0, 0.0, ge=0),
    )


def _slopes(H: int) -> tuple[float, ...]:
    """The slope of each of H heads: those of the next power of two, of which every other one comes first."""
    count = 1 << (H - 1).bit_length()
    found = [2 ** (-8 * i / count) for i in range(1, count + 1)]
    return tuple(found if count == H else (found[1::2] + found[::2])[:H])


def embed_weights(c: Config) -> dict[str, Weight]:
    return {"tokens": token_table(c, *gpt2.named("wte.weight")[0])}


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    inner = c.H * c.E

    def of(name: str) -> tuple[tuple[str, ...], ...]:
        return gpt2.named(f"blocks.{{layer}}.{name}.weight")

    return {
        "attn_norm": Weight((c.D,), of("norm_1")),
        "qkv": Weight((3 * inner, c.D), of("attn.Wqkv"), (inner,) * 3, shard="output", heads=(c.H,) * 3),
        "slopes": slope_weight(c.slopes[: c.H], c.E, c.scale),
        "o": Weight((c.D, inner), of("attn.out_proj"), shard="input"),
        "ffn_norm": Weight((c.D,), of("norm_2")),
        "up": Weight((c.F, c.D), of("ffn.up_proj"), shard="output"),
        "down": Weight((c.D, c.F), of("ffn.down_proj"), shard="input"),
    }


def head_weights(c: Config) -> dict[str, Weight]:
    return {"norm": Weight((c.D,), gpt2.named("norm_f.weight")), "lm_head": head_matrix(c)}


def states(c: Config, layer_type: str) -> tuple[StateSpec, ...]:
    return (alibi_state(c.K, c.E),)


def embed(c: Config, w: SimpleNamespace, ctx: ForwardContext) -> tuple[Tensor, tuple[Tensor, ...]]:
    x_TD = embedding(ctx.inputs.token_ids, w.tokens)
    return x_TD, (position_channels(ctx.inputs.positions, c.E, x_TD.dtype),)


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    qkv_TO = linear(layer_norm(x_TD, w.attn_norm, None, c.eps), w.qkv)
    if c.clip:
        qkv_TO = qkv_TO.clamp(-c.clip, c.clip)
    a_THE = alibi_attention(split_heads(qkv_TO, c.H, c.K, c.E), w.slopes, ctx, c.scale)
    x_TD = x_TD + linear(a_THE.flatten(1), w.o)
    return x_TD + gpt2.mlp(c, w, layer_norm(x_TD, w.ffn_norm, None, c.eps))


def norm(c: Config, w: SimpleNamespace, x_TD: Tensor) -> Tensor:
    return layer_norm(x_TD, w.norm, None, c.eps)


def head(c: Config, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    return linear(norm(c, w, select_rows(x_TD, ctx.inputs.logits_indices)), w.lm_head)


register_model(
    replace(
        gpt2.MODEL,
        architectures=("MptForCausalLM", "MPTForCausalLM"),
        config=from_hf,
        graphs=(
            replace(
                gpt2.GRAPH,
                embed_weights=embed_weights,
                layer_weights=layer_weights,
                head_weights=head_weights,
                embed=embed,
                layer=layer,
                head=head,
                states=states,
                norm=norm,
            ),
        ),
    )
)
