"""OPT: GPT-2's layers with other names, separate projections and positions that start at row 2 of their table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from graphllm.config.fields import MOST, switch, whole
from graphllm.ir import Weight, register_model
from graphllm.model_defs import gpt2
from graphllm.model_defs.common import HF, MOST_LAYERS, Sources, check_plain, only, token_table, widths, with_bias

_FIRST_POSITION = 2
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu"}


def from_hf(hf: HF) -> gpt2.Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported, such as OPT-350m has."""
    check_plain(hf)
    D, H, E = widths(hf, "hidden_size", "num_attention_heads")
    only(hf, "do_layer_norm_before", True)
    only(hf, "_remove_final_layer_norm", False)
    only(hf, "word_embed_proj_dim", D, None)
    only(hf, "enable_bias", True)
    only(hf, "layer_norm_elementwise_affine", True)
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


def _names(*names: str) -> tuple[tuple[str, ...], ...]:
    return tuple(("model.decoder." + name, "decoder." + name) for name in names)


def embed_weights(c: gpt2.Config) -> dict[str, Weight]:
    rows = (_FIRST_POSITION, _FIRST_POSITION + c.max_len)
    return {
        "tokens": token_table(c, *_names("embed_tokens.weight")[0]),
        "positions": Weight((c.max_len, c.D), _names("embed_positions.weight"), slice_rows=rows),
    }


def layer_weights(c: gpt2.Config, layer_type: str) -> dict[str, Weight]:
    inner = c.H * c.E

    def of(*names: str) -> Callable[[str], Sources]:
        return lambda leaf: _names(*(f"layers.{{layer}}.{name}.{leaf}" for name in names))

    qkv = of("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return {
        **with_bias("attn_norm", (c.D,), of("self_attn_layer_norm")),
        **with_bias("qkv", (3 * inner, c.D), qkv, (inner,) * 3, "output"),
        **with_bias("o", (c.D, inner), of("self_attn.out_proj"), shard="input"),
        **with_bias("ffn_norm", (c.D,), of("final_layer_norm")),
        **with_bias("up", (c.F, c.D), of("fc1"), shard="output"),
        **with_bias("down", (c.D, c.F), of("fc2"), shard="input"),
    }


def head_weights(c: gpt2.Config) -> dict[str, Weight]:
    return gpt2.head_weights(c) | with_bias("norm", (c.D,), lambda leaf: _names(f"final_layer_norm.{leaf}"))


register_model(
    replace(
        gpt2.MODEL,
        architectures=("OPTForCausalLM",),
        config=from_hf,
        graphs=(
            replace(gpt2.GRAPH, embed_weights=embed_weights, layer_weights=layer_weights, head_weights=head_weights),
        ),
    )
)
