"""OPT: GPT-2's layers with other names, separate projections and positions that start at row 2 of their table."""

from __future__ import annotations

from graphllm.config.fields import MOST, switch, whole
from graphllm.ir import Graph, Model, Weight, register_model
from graphllm.model_defs import gpt2
from graphllm.model_defs.common import HF, MOST_LAYERS, check_plain, only, token_table

_FIRST_POSITION = 2
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu"}


def from_hf(hf: HF) -> gpt2.Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported (those of OPT-350m)."""
    check_plain(hf)
    D, H = whole(hf, "hidden_size", 768), whole(hf, "num_attention_heads", 12)
    only(hf, "do_layer_norm_before", True)
    only(hf, "_remove_final_layer_norm", False)
    only(hf, "word_embed_proj_dim", D, None)
    only(hf, "enable_bias", True)
    only(hf, "layer_norm_elementwise_affine", True)
    E = gpt2.head_width(D, H, "hidden_size", "num_attention_heads")
    return gpt2.Config(
        D=D,
        H=H,
        K=H,
        E=E,
        F=whole(hf, "ffn_dim", 3072),
        V=whole(hf, "vocab_size", 50272),
        L=whole(hf, "num_hidden_layers", 12, le=MOST_LAYERS),
        max_len=whole(hf, "max_position_embeddings", 2048, le=MOST),
        eps=1e-5,
        scale=E**-0.5,
        activation=_ACTIVATIONS[only(hf, "activation_function", *_ACTIVATIONS)],
        tied=switch(hf, "tie_word_embeddings", True),
    )


def _names(name: str) -> tuple[tuple[str, ...]]:
    return (("model.decoder." + name, "decoder." + name),)


def embed_weights(c: gpt2.Config) -> dict[str, Weight]:
    rows = (_FIRST_POSITION, _FIRST_POSITION + c.max_len)
    return {
        "tokens": token_table(c, *_names("embed_tokens.weight")[0]),
        "positions": Weight((c.max_len, c.D), _names("embed_positions.weight"), slice_rows=rows),
    }


def layer_weights(c: gpt2.Config, layer_type: str) -> dict[str, Weight]:
    hf, inner = "layers.{layer}.", c.H * c.E
    parts = (inner, inner, inner)

    def qkv(leaf: str) -> tuple[tuple[str, ...], ...]:
        return tuple(_names(f"{hf}self_attn.{p}_proj.{leaf}")[0] for p in "qkv")

    return {
        "attn_norm": Weight((c.D,), _names(hf + "self_attn_layer_norm.weight")),
        "attn_norm_bias": Weight((c.D,), _names(hf + "self_attn_layer_norm.bias")),
        "qkv": Weight((3 * inner, c.D), qkv("weight"), parts, shard="output"),
        "qkv_bias": Weight((3 * inner,), qkv("bias"), parts, shard="output"),
        "o": Weight((c.D, inner), _names(hf + "self_attn.out_proj.weight"), shard="input"),
        "o_bias": Weight((c.D,), _names(hf + "self_attn.out_proj.bias")),
        "ffn_norm": Weight((c.D,), _names(hf + "final_layer_norm.weight")),
        "ffn_norm_bias": Weight((c.D,), _names(hf + "final_layer_norm.bias")),
        "up": Weight((c.F, c.D), _names(hf + "fc1.weight"), shard="output"),
        "up_bias": Weight((c.F,), _names(hf + "fc1.bias"), shard="output"),
        "down": Weight((c.D, c.F), _names(hf + "fc2.weight"), shard="input"),
        "down_bias": Weight((c.D,), _names(hf + "fc2.bias")),
    }


def head_weights(c: gpt2.Config) -> dict[str, Weight]:
    return gpt2.head_weights(c) | {
        "norm": Weight((c.D,), _names("final_layer_norm.weight")),
        "norm_bias": Weight((c.D,), _names("final_layer_norm.bias")),
    }


register_model(
    Model(
        architectures=("OPTForCausalLM",),
        config=from_hf,
        graphs=(
            Graph(
                layer_types=lambda c: ("layer",) * c.L,
                embed_weights=embed_weights,
                layer_weights=layer_weights,
                head_weights=head_weights,
                embed=gpt2.embed,
                layer=gpt2.layer,
                head=gpt2.head,
                norm=gpt2.norm,
                states=gpt2.states,
            ),
        ),
        shardable=("H", "K", "F"),
    )
)
