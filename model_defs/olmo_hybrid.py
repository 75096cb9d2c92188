"""OLMo Hybrid: gated delta nets, normalized before they compute, and attention that is normalized behind it.

Released checkpoints rotate nothing: attention knows no positions, which the delta nets below it bring along. Source:
Ai2 2025, OLMo Hybrid; Grazzi et al. 2024 for shares above 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

from torch import Tensor

from graphllm.config import ConfigError
from graphllm.config.fields import raw, section, strings, switch, whole
from graphllm.ir import ForwardContext, StateSpec, Weight, register_model
from graphllm.model_defs import llama, qwen3_next
from graphllm.model_defs.common import HF, LARGEST_HEAD, extended, layer_types_of, only
from graphllm.ops.embeddings.embedding import embedding
from graphllm.ops.norms.rms_norm import rms_norm
from graphllm.weights.plan.expr import Concat, Each, Read, Reshape

_KINDS = {"full_attention": "full", "linear_attention": "linear"}


@dataclass(frozen=True)
class Config(qwen3_next.Config):
    """positions: whether attention rotates queries and keys."""

    positions: bool = True


def from_hf(hf: HF) -> Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    hf = {"max_position_embeddings": 65_536, **hf}
    only(hf, "mlp_bias", False)
    rotary = section(hf, "rope_parameters")
    rotates = raw(hf, "rope_theta", 1) is not None and raw(rotary, "rope_theta", 1) is not None
    unrotated = {"rope_theta": 10000.0, "rope_parameters": None, "rope_scaling": None}
    dense = llama.from_hf({**hf, **({} if rotates else unrotated)}, "Llama")
    L = len(dense.layer_types)
    usual = ["full_attention" if i % 4 == 3 or (L < 4 and i == L - 1) else "linear_attention" for i in range(L)]
    kinds = strings(hf, "layer_types") or usual
    G = whole(hf, "linear_num_key_heads", dense.H, dense.H)
    H_delta = whole(hf, "linear_num_value_heads", dense.H, dense.H)
    if H_delta % G:
        raise ConfigError(f"config.json: linear_num_value_heads is {H_delta}, no multiple of linear_num_key_heads, {G}")
    usual_keys = int(0.75 * dense.D / G)
    K_delta = whole(hf, "linear_key_head_dim", usual_keys, usual_keys, le=LARGEST_HEAD)
    return extended(
        Config,
        dense,
        layer_types=layer_types_of(kinds, L, _KINDS),
        qk_norm="row",
        G=G,
        H_delta=H_delta,
        K_delta=K_delta,
        V_delta=whole(hf, "linear_value_head_dim", 2 * K_delta, 2 * K_delta, le=LARGEST_HEAD),
        taps=whole(hf, "linear_conv_kernel_dim", 4, ge=2, le=64),
        eps_delta=1e-5,
        most_beta=2.0 if switch(hf, "linear_allow_neg_eigval", True) else 1.0,
        positions=rotates,
    )


def embed_weights(c: Config) -> dict[str, Weight]:
    weights = llama.embed_weights(c)
    return weights if c.positions else {"tokens": weights["tokens"]}


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    weights = {n: w for n, w in llama.layer_weights(c, layer_type).items() if not n.startswith("attn_norm")}
    after = (llama.LAYER + "feedforward_layer_norm.weight", llama.LAYER + "post_attention_layernorm.weight")
    if layer_type == "full":
        return weights | {
            "attn_norm": Weight((c.D,), (after,)),
            "ffn_norm": Weight((c.D,), (llama.LAYER + "post_feedforward_layernorm.weight",)),
        }
    before = (llama.LAYER + "attention_layer_norm.weight", llama.LAYER + "input_layernorm.weight")
    return _delta_weights(c) | {
        "attn_norm": Weight((c.D,), (before,)),
        "ffn_norm": Weight((c.D,), (after,)),
        "gate_up": weights["gate_up"],
        "down": weights["down"],
    }


def _delta_weights(c: Config) -> dict[str, Weight]:
    """Qwen3-Next's, of projections that are stored apart."""
    delta, kinds = llama.LAYER + "linear_attn.", (c.G, c.G, c.H_delta)
    q, k, v = c.parts
    by_head = Weight((c.H_delta,), dtype="float32", shard="output", heads=(c.H_delta,))
    taps = tuple(
        Reshape(Read((f"{delta}{name}_conv1d.weight",), (rows, 1, c.taps)), (rows, c.taps))
        for name, rows in zip("qkv", c.parts, strict=True)
    )
    return {
        "qkvz": llama.merged("q k v g", delta, (q, k, v, v), c.D, heads=(*kinds, c.H_delta)),
        "beta_gate": llama.merged("b a", delta, (c.H_delta,) * 2, c.D, heads=(c.H_delta,) * 2),
        "conv": Weight((q + k + v, c.taps), (), c.parts, shard="output", heads=kinds, exact=True, expr=Concat(taps)),
        "rate": replace(by_head, expr=Each("-exp", Read((delta + "A_log",), (c.H_delta,)))),
        "gate_bias": replace(by_head, sources=(delta + "dt_bias",)),
        "delta_norm": Weight((c.V_delta,), (delta + "o_norm.weight",)),
        "o": Weight((c.D, v), (delta + "o_proj.weight",), shard="input"),
    }


def states(c: Config, layer_type: str) -> tuple[StateSpec, ...]:
    return qwen3_next.states(c, layer_type)


def embed(c: Config, w: SimpleNamespace, ctx: ForwardContext) -> tuple[Tensor, tuple[Tensor, ...]]:
    return llama.embed(c, w, ctx) if c.positions else (embedding(ctx.inputs.token_ids, w.tokens), ())


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    if layer_type == "linear":
        x_TD = x_TD + qwen3_next.delta_net(c, w, rms_norm(x_TD, w.attn_norm, c.eps), ctx)
        return llama.feed_forward(c, w, x_TD)
    x_TD = x_TD + rms_norm(llama.attend(c, layer_type, w, x_TD, ctx), w.attn_norm, c.eps)
    return x_TD + rms_norm(llama.mlp(w, x_TD), w.ffn_norm, c.eps)


register_model(
    replace(
        llama.MODEL,
        architectures=("OlmoHybridForCausalLM",),
        config=from_hf,
        graphs=(
            replace(
                llama.GRAPH, embed_weights=embed_weights, layer_weights=layer_weights, embed=embed, layer=layer,
                states=states,
            ),
        ),
        shardable=("H", "K", "F", "G", "H_delta"),
    )
)  # fmt: skip
