"""GPT-OSS: attention with sinks, a window in every other layer, and experts with biases and a clamped SwiGLU, which the
checkpoint stores stacked, transposed, and with gates and ups by turns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

from torch import Tensor

from graphllm.config.fields import MOST, number, raw, strings, whole
from graphllm.ir import ForwardContext, Weight, register_model
from graphllm.model_defs import llama
from graphllm.model_defs.common import HF, experts_per_token, extended, layer_types_of, only
from graphllm.ops.gemm.linear import linear
from graphllm.ops.moe.fused_moe import fused_moe
from graphllm.ops.moe.moe_route import moe_route
from graphllm.ops.norms.rms_norm import rms_norm
from graphllm.weights.plan.expr import Expr, Permute, Read, Reshape

# What files leave out.
_DEFAULTS = {
    "attention_bias": True, "head_dim": 64, "max_position_embeddings": 131_072, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 150_000.0,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


@dataclass(frozen=True)
class Config(llama.Config):
    """N experts of width F, A of them for each token; the limit of their activation."""

    N: int = 0
    A: int = 0
    limit: float = 0.0


def from_hf(hf: HF) -> Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    hf = _DEFAULTS | dict(hf)
    if not raw(hf, "rope_scaling") and not raw(hf, "rope_parameters"):
        hf["rope_scaling"] = _YARN
    dense = llama.from_hf(hf, "Llama")
    only(hf, "swiglu_alpha", 1.702)
    L, N = len(dense.layer_types), whole(hf, "num_local_experts")
    A = experts_per_token(hf, N, 4)
    alternating = ["full_attention" if i % 2 else "sliding_attention" for i in range(L)]
    types = layer_types_of(strings(hf, "layer_types") or alternating, L)
    return extended(
        Config,
        dense,
        layer_types=types,
        window=whole(hf, "sliding_window", 128, le=MOST) if "sliding" in types else 0,
        mlp_bias=False,
        N=N,
        A=A,
        limit=number(hf, "swiglu_limit", 7.0, gt=0, le=1e6),
    )


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    router, experts = llama.LAYER + "mlp.router.", llama.LAYER + "mlp.experts."
    gate_up = _halves(Read((experts + "gate_up_proj",), (c.N, c.D, 2 * c.F)))
    bias = _halves(Read((experts + "gate_up_proj_bias",), (c.N, 2 * c.F)))
    halves = (c.F,) * (2 * c.N)
    down = Permute(Read((experts + "down_proj",), (c.N, c.F, c.D)), (0, 2, 1))
    return llama.attention_weights(c) | {
        "sinks": Weight((c.H,), (llama.LAYER + "self_attn.sinks",), shard="output", heads=(c.H,)),
        "router": Weight((c.N, c.D), (router + "weight",), exact=True),
        "router_bias": Weight((c.N,), (router + "bias",)),
        "gate_up": Weight((c.N, 2 * c.F, c.D), (), halves, expr=gate_up, shard="output", expert_axis=0),
        "gate_up_bias": Weight((c.N, 2 * c.F), (), halves, expr=bias, shard="output", expert_axis=0),
        "down": Weight((c.N, c.D, c.F), expr=down, shard="input", expert_axis=0),
        "down_bias": Weight((c.N, c.D), (experts + "down_proj_bias",), expert_axis=0),
    }


def _halves(by_turns: Read) -> Expr:
    """Of each expert the gates before the ups, from [N, .., 2F] by turns: [N, 2F, ..]."""
    N, *inner, twice = by_turns.stored
    pairs = Reshape(by_turns, (N, *inner, twice // 2, 2))
    last = len(pairs.to) - 1
    return Reshape(Permute(pairs, (0, last, last - 1, *range(1, last - 1))), (N, twice, *inner))


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    x_TD = x_TD + llama.attend(c, layer_type, w, rms_norm(x_TD, w.attn_norm, c.eps), ctx)
    h_TD = rms_norm(x_TD, w.ffn_norm, c.eps)
    route = moe_route(linear(h_TD, w.router, w.router_bias), c.A)
    return x_TD + fused_moe(h_TD, w.gate_up, w.down, *route, "clamped", c.limit, w.gate_up_bias, w.down_bias)


register_model(
    replace(
        llama.MODEL,
        architectures=("GptOssForCausalLM",),
        config=from_hf,
        graphs=(replace(llama.GRAPH, layer_weights=layer_weights, layer=layer),),
        of_experts=("F",),
    )
)
