"""Plain: a decoder with learned positions, and attention without a feed-forward layer."""

from dataclasses import dataclass

from graphllm.config.fields import whole
from graphllm.ir import Graph, Model, Weight, register_model, select_rows
from graphllm.model_defs.common import split_heads
from graphllm.ops import embedding, linear, paged_attention, rms_norm
from graphllm.ops.attention.paged_attention import kv_state

EPS = 1e-6


@dataclass(frozen=True)
class Config:
    D: int
    H: int
    K: int
    E: int
    V: int
    max_len: int
    layers: int


def config(hf):
    D, H = whole(hf, "hidden_size"), whole(hf, "num_attention_heads")
    V, max_len = whole(hf, "vocab_size"), whole(hf, "max_position_embeddings")
    return Config(D, H, H, D // H, V, max_len, whole(hf, "num_hidden_layers"))


def embed_weights(c):
    return {
        "tokens": Weight((c.V, c.D), ("tokens.weight",), shard="vocab"),
        "positions": Weight((c.max_len, c.D), ("positions.weight",)),
    }


def layer_weights(c, layer_type):
    of = "layers.{layer}."
    return {
        "norm": Weight((c.D,), (of + "norm.weight",)),
        "qkv": Weight((3 * c.D, c.D), tuple(f"{of}{p}.weight" for p in "qkv"), (c.D, c.D, c.D), shard="output"),
        "o": Weight((c.D, c.D), (of + "o.weight",), shard="input"),
    }


def head_weights(c):
    return {"norm": Weight((c.D,), ("norm.weight",)), "out": Weight((c.V, c.D), tie="embed.tokens", shard="vocab")}


def embed(c, w, ctx):
    return embedding(ctx.inputs.token_ids, w.tokens) + embedding(ctx.inputs.positions, w.positions), ()


def layer(c, layer_type, w, x_TD, ctx):
    q_THE, k_TKE, v_TKE = split_heads(linear(rms_norm(x_TD, w.norm, EPS), w.qkv), c.H, c.K, c.E)
    a_THE = paged_attention(q_THE, k_TKE, v_TKE, ctx.state.kv, *ctx.attn, scale=c.E**-0.5)
    return x_TD + linear(a_THE.flatten(1), w.o)


def head(c, w, x_TD, ctx):
    return linear(rms_norm(select_rows(x_TD, ctx.inputs.logits_indices), w.norm, EPS), w.out)


register_model(
    Model(
        architectures=("PlainForCausalLM",),
        config=config,
        graphs=(
            Graph(
                layer_types=lambda c: ("full",) * c.layers,
                embed_weights=embed_weights,
                layer_weights=layer_weights,
                head_weights=head_weights,
                embed=embed,
                layer=layer,
                head=head,
                states=lambda c, layer_type: (kv_state(c.K, c.E),),
            ),
        ),
    )
)
