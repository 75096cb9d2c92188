"""LFM2: layers of a gated short convolution and of attention with normalized heads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from graphllm.config.fields import number, raw, strings, switch, whole
from graphllm.ir import ForwardContext, StateSpec, Weight, register_model
from graphllm.model_defs import llama
from graphllm.model_defs.common import HF, check_plain, extended, layer_types_of, with_bias
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.rms_norm import rms_norm
from graphllm.ops.recurrent.causal_conv import causal_conv
from graphllm.ops.recurrent.slots import Slots
from graphllm.weights.plan.expr import Read, Reshape

_DEFAULTS: dict[str, Any] = {
    "hidden_size": 2560, "intermediate_size": 12288, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 128_000, "vocab_size": 65536, "tie_word_embeddings": True,
    "rope_theta": 1e6,
}  # fmt: skip
_TYPES = {"conv": "conv", "full_attention": "full"}


@dataclass(frozen=True)
class Config(llama.Config):
    """W: tokens that the convolution sees. conv_bias: of the convolution and its projections."""

    W: int = 3
    conv_bias: bool = False


def from_hf(hf: HF) -> Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    check_plain(hf)
    hf = _DEFAULTS | dict(hf)
    for old, new in (("block_ff_dim", "intermediate_size"), ("tie_embedding", "tie_word_embeddings")):
        if raw(hf, old) is not None:
            hf = {**hf, new: hf[old]}
    F, eps = whole(hf, "intermediate_size"), number(hf, "norm_eps", 1e-5, ge=0, le=1)
    if switch(hf, "block_auto_adjust_ff_dim", True):
        multiple = whole(hf, "block_multiple_of", 256)
        F = -(-int(number(hf, "block_ffn_dim_multiplier", 1.0) * (2 * F // 3)) // multiple) * multiple
    dense = llama.from_hf({**hf, "layer_types": None, "intermediate_size": F, "rms_norm_eps": eps}, "Llama")
    return extended(
        Config,
        dense,
        layer_types=_layer_types(hf, len(dense.layer_types)),
        qk_norm="head",
        W=whole(hf, "conv_L_cache", 3, ge=2),
        conv_bias=switch(hf, "conv_bias", False),
    )


def _layer_types(hf: HF, L: int) -> tuple[str, ...]:
    full = raw(hf, "full_attn_idxs")
    full = list(range(L)) if full is None else full
    types = strings(hf, "layer_types") or tuple("full_attention" if i in full else "conv" for i in range(L))
    return layer_types_of(types, L, _TYPES)


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    attn, mlp, conv = (llama.LAYER + part for part in ("self_attn.", "feed_forward.", "conv."))
    norms = {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"}
    weights = {name: Weight((c.D,), (f"{llama.LAYER}{source}.weight",)) for name, source in norms.items()}
    gate_up = (mlp + "w1.weight", mlp + "w3.weight")
    weights |= {
        "gate_up": Weight((2 * c.F, c.D), gate_up, (c.F, c.F), shard="output"),
        "down": Weight((c.D, c.F), (mlp + "w2.weight",), shard="input"),
    }
    if layer_type == "full":
        parts = (c.H * c.E, c.K * c.E, c.K * c.E)
        return weights | {
            "qkv": llama.merged("q k v", attn, parts, c.D, heads=(c.H, c.K, c.K)),
            "o": Weight((c.D, c.H * c.E), (attn + "out_proj.weight",), shard="input"),
            "q_norm": Weight((c.E,), (attn + "q_layernorm.weight",)),
            "k_norm": Weight((c.E,), (attn + "k_layernorm.weight",)),
        }
    taps = Reshape(Read((conv + "conv.weight",), (c.D, 1, c.W)), (c.D, c.W))
    parts_of = {"in_proj": (3 * c.D, c.D), "out_proj": (c.D, c.D)}
    for name, shape in parts_of.items():
        weights |= with_bias(name, shape, lambda leaf, name=name: (f"{conv}{name}.{leaf}",))  # type: ignore[misc]
    weights |= {"conv": Weight((c.D, c.W), expr=taps), "conv_bias": Weight((c.D,), (conv + "conv.bias",))}
    return weights if c.conv_bias else {name: w for name, w in weights.items() if not name.endswith("_bias")}


def head_weights(c: Config) -> dict[str, Weight]:
    return {**llama.head_weights(c), "norm": Weight((c.D,), ("model.embedding_norm.weight",))}


def states(c: Config, layer_type: str) -> tuple[StateSpec, ...]:
    if layer_type == "conv":
        return (StateSpec("conv", "slot", (c.W - 1, c.D), retention="last"),)
    return llama.states(c, layer_type)


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    h_TD = rms_norm(x_TD, w.attn_norm, c.eps)
    mixed_TD = _convolve(w, h_TD, ctx) if layer_type == "conv" else llama.attend(c, layer_type, w, h_TD, ctx)
    return llama.feed_forward(c, w, x_TD + mixed_TD)


def _convolve(w: SimpleNamespace, h_TD: Tensor, ctx: ForwardContext) -> Tensor:
    at = Slots.of(ctx.inputs)
    before_TD, after_TD, x_TD = linear(h_TD, w.in_proj, getattr(w, "in_proj_bias", None)).chunk(3, 1)
    conved_TD = causal_conv(
        before_TD * x_TD, w.conv, ctx.state.conv, at, getattr(w, "conv_bias", None), "", ctx.inputs.exports
    )
    return linear(after_TD * conved_TD, w.out_proj, getattr(w, "out_proj_bias", None))


register_model(
    replace(
        llama.MODEL,
        architectures=("Lfm2ForCausalLM",),
        config=from_hf,
        graphs=(
            replace(llama.GRAPH, layer_weights=layer_weights, head_weights=head_weights, layer=layer, states=states),
        ),
    )
)
