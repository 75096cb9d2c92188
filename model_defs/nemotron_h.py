"""Nemotron-H: layers of Mamba2, of attention without positions, and of a feed-forward part with squared ReLU, one norm
each. Layers with experts are not there yet."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from torch import Tensor
from torch.nn.functional import relu

from graphllm.config import ConfigError
from graphllm.config.fields import MOST, number, raw, strings, switch, whole
from graphllm.ir import ForwardContext, Graph, Model, StateSpec, Weight, register_model
from graphllm.model_defs import mamba2
from graphllm.model_defs.common import HF, check_plain, heads, only, split_heads
from graphllm.model_defs.llama import merged
from graphllm.ops.attention.paged_attention import kv_state, paged_attention
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.rms_norm import rms_norm

_LAYER = "backbone.layers.{layer}."
_TYPES = {
    "linear_attention": "mamba2", "mamba": "mamba2", "full_attention": "full", "attention": "full", "mlp": "mlp",
    "M": "mamba2", "*": "full", "-": "mlp", "E": "moe", "moe": "moe",
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """D width, H query heads, K key/value heads of E, F feed-forward width, V vocabulary."""

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
    layer_types: tuple[str, ...]  # "mamba2", "full" or "mlp"
    mixer: mamba2.Mixer


def from_hf(hf: HF) -> Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    check_plain(hf)
    only(hf, "mlp_hidden_act", "relu2")
    only(hf, "mamba_hidden_act", "silu")
    only(hf, "attention_bias", False)
    only(hf, "sliding_window", None)
    D, (H, K), eps = whole(hf, "hidden_size", 4096), heads(hf), number(hf, "layer_norm_epsilon", 1e-5, ge=0, le=1)
    bias, G = switch(hf, "use_bias", False), whole(hf, "n_groups", 8)
    mixer = mamba2.Mixer(
        D=D, H=whole(hf, "mamba_num_heads", 128), P=whole(hf, "mamba_head_dim", 64), G=G,
        N=whole(hf, "ssm_state_size", 128), W=whole(hf, "conv_kernel", 4, ge=2), bias=bias, out_bias=bias,
        conv_bias=switch(hf, "use_conv_bias", True), eps=eps, limits=(number(hf, "time_step_min", 0.001), 0.0),
    )  # fmt: skip
    if mixer.H % G:
        raise ConfigError(f"config.json: mamba_num_heads is {mixer.H}, no multiple of n_groups {G}; change one of them")
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
        layer_types=_layer_types(hf),
        mixer=mixer,
    )


def _layer_types(hf: HF) -> tuple[str, ...]:
    pattern = raw(hf, "hybrid_override_pattern")
    given = strings(hf, "layers_block_type") or strings(hf, "layer_types") or tuple(pattern or ())
    types = tuple(_TYPES.get(name, name) for name in given)
    for name, known in zip(given, types, strict=True):
        if known not in ("mamba2", "full", "mlp"):
            raise ConfigError(
                f"config.json: a layer is of the type {name!r}, which is not supported; use a checkpoint with layers "
                "of Mamba2, attention and dense feed-forward parts"
            )
    if not types:
        raise ConfigError("config.json: layers_block_type is missing; give the type of each layer")
    return types


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    mixer, norm = _LAYER + "mixer.", {"norm": Weight((c.D,), (_LAYER + "norm.weight",))}
    if layer_type == "mamba2":
        return norm | mamba2.mixer_weights(c.mixer, mixer)
    if layer_type == "full":
        parts = (c.H * c.E, c.K * c.E, c.K * c.E)
        return norm | {
            "qkv": merged("q k v", mixer, parts, c.D, heads=(c.H, c.K, c.K)),
            "o": Weight((c.D, c.H * c.E), (mixer + "o_proj.weight",), shard="input"),
        }
    weights = norm | {
        "up": Weight((c.F, c.D), (mixer + "up_proj.weight",), shard="output"),
        "down": Weight((c.D, c.F), (mixer + "down_proj.weight",), shard="input"),
    }
    if c.mlp_bias:
        weights["up_bias"] = Weight((c.F,), (mixer + "up_proj.bias",), shard="output")
        weights["down_bias"] = Weight((c.D,), (mixer + "down_proj.bias",))
    return weights


def states(c: Config, layer_type: str) -> tuple[StateSpec, ...]:
    return {"mamba2": mamba2.mixer_states(c.mixer), "full": (kv_state(c.K, c.E),), "mlp": ()}[layer_type]


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    h_TD = rms_norm(x_TD, w.norm, c.eps)
    if layer_type == "mamba2":
        return x_TD + mamba2.mix(c.mixer, w, h_TD, ctx)
    if layer_type == "full":
        q_THE, k_TKE, v_TKE = split_heads(linear(h_TD, w.qkv), c.H, c.K, c.E)
        a_THE = paged_attention(q_THE, k_TKE, v_TKE, ctx.state.kv, *ctx.attn, c.E**-0.5)
        return x_TD + linear(a_THE.flatten(1), w.o)
    up_TF = relu(linear(h_TD, w.up, getattr(w, "up_bias", None))).square()
    return x_TD + linear(up_TF, w.down, getattr(w, "down_bias", None))


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
        architectures=("NemotronHForCausalLM",), config=from_hf, graphs=(GRAPH,), shardable=("H", "K", "F"),
        shared=("K",),
    )
)  # fmt: skip
