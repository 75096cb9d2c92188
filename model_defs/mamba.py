"""Mamba and FalconMamba: layers without attention, a short convolution and a selective scan each. FalconMamba
normalizes what the scan's step sizes, inputs and outputs are made of."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import torch
from torch import Tensor

from graphllm.config.fields import MOST, number, raw, switch, whole
from graphllm.ir import ForwardContext, Graph, Model, StateSpec, Weight, register_model, select_rows
from graphllm.model_defs.common import HF, MOST_LAYERS, check_plain, head_matrix, only, token_table
from graphllm.ops.embeddings.embedding import embedding
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.rms_norm import rms_norm
from graphllm.ops.recurrent.causal_conv import causal_conv
from graphllm.ops.recurrent.selective_scan import selective_scan
from graphllm.ops.recurrent.slots import Slots
from graphllm.weights.plan.expr import Each, Read, Reshape

LAYER = "backbone.layers.{layer}."
MOST_STATES = 256  # of a channel
MOST_TAPS = 64


@dataclass(frozen=True)
class Mixer:
    """D width, M channels of the mixer, N states of each, R numbers that step sizes are made of, W inputs that the
    convolution sees."""

    D: int
    M: int
    N: int
    R: int
    W: int
    bias: bool  # of the projections into and out of the mixer
    conv_bias: bool
    mixer_norms: Literal["", "plain", "weighted"]  # of step sizes, inputs and outputs: none, or without a weight
    mixer_eps: float


@dataclass(frozen=True)
class Config(Mixer):
    """V vocabulary, L layers. wide: what layers add to is float32, whatever the dtype."""

    V: int
    L: int
    max_len: int
    eps: float
    tied: bool
    wide: bool


def from_hf(hf: HF) -> Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    check_plain(hf)
    only(hf, "hidden_act", "silu")
    only(hf, "rms_norm", True)  # the files of Mamba's authors say so
    falcon = hf["architectures"][0] == "FalconMambaForCausalLM"
    D = whole(hf, "hidden_size", 768)
    return Config(
        D=D,
        M=whole(hf, "intermediate_size") if "intermediate_size" in hf else whole(hf, "expand", 2) * D,
        N=whole(hf, "state_size", 16, le=MOST_STATES),
        R=rank(hf, "time_step_rank", D),
        W=whole(hf, "conv_kernel", 4, ge=2, le=MOST_TAPS),
        bias=switch(hf, "use_bias", False),
        conv_bias=switch(hf, "use_conv_bias", True),
        mixer_norms="plain" if falcon else "",
        mixer_eps=number(hf, "mixer_rms_eps", 1e-6, ge=0, le=1) if falcon else 0.0,
        V=whole(hf, "vocab_size", 50280),
        L=whole(hf, "num_hidden_layers", 32, le=MOST_LAYERS),
        max_len=MOST,  # nothing in the model counts tokens
        eps=number(hf, "layer_norm_epsilon", 1e-5, ge=0, le=1),
        tied=switch(hf, "tie_word_embeddings", True),
        wide=switch(hf, "residual_in_fp32", True),
    )


def rank(hf: HF, name: str, D: int) -> int:
    """How many numbers step sizes are made of: the field's value, or a sixteenth of the width for "auto"."""
    return -(-D // 16) if raw(hf, name, "auto") == "auto" else whole(hf, name)


def mixer_weights(c: Mixer, of: str) -> dict[str, Weight]:
    """The weights of a mixer, whose tensors' names begin with ``of``."""
    taps = Reshape(Read((of + "conv1d.weight",), (c.M, 1, c.W)), (c.M, c.W))
    decay = Each("-exp", Read((of + "A_log",), (c.M, c.N)))
    weights = {
        "in_proj": Weight((2 * c.M, c.D), (of + "in_proj.weight",), (c.M, c.M), shard="output"),
        "conv": Weight((c.M, c.W), expr=taps, shard="output"),
        "x_proj": Weight((c.R + 2 * c.N, c.M), (of + "x_proj.weight",), shard="input"),
        "dt_proj": Weight((c.M, c.R), (of + "dt_proj.weight",), shard="output"),
        "dt_bias": Weight((c.M,), (of + "dt_proj.bias",), shard="output", dtype="float32"),
        "decay": Weight((c.M, c.N), expr=decay, shard="output", dtype="float32"),
        "skip": Weight((c.M,), (of + "D",), shard="output", dtype="float32"),
        "out_proj": Weight((c.D, c.M), (of + "out_proj.weight",), shard="input"),
    }
    if c.bias:
        weights["in_proj_bias"] = Weight((2 * c.M,), (of + "in_proj.bias",), (c.M, c.M), shard="output")
        weights["out_proj_bias"] = Weight((c.D,), (of + "out_proj.bias",))
    if c.conv_bias:
        weights["conv_bias"] = Weight((c.M,), (of + "conv1d.bias",), shard="output")
    if c.mixer_norms == "weighted":
        for name, width in (("dt", c.R), ("b", c.N), ("c", c.N)):
            weights[f"{name}_norm"] = Weight((width,), (f"{of}{name}_layernorm.weight",))
    return weights


def mixer_states(c: Mixer) -> tuple[StateSpec, ...]:
    return (
        StateSpec("conv", "slot", (c.W - 1, c.M), retention="last"),
        StateSpec("ssm", "slot", (c.M, c.N), "recurrent", retention="last", int8_over=-1),
    )


def mix(c: Mixer, w: SimpleNamespace, h_TD: Tensor, ctx: ForwardContext) -> Tensor:
    """The mixer, from normalized rows to what is added to the stream."""
    at = Slots.of(ctx.inputs)
    x_TM, gate_TM = linear(h_TD, w.in_proj, getattr(w, "in_proj_bias", None)).split(c.M, dim=1)
    x_TM = causal_conv(x_TM, w.conv, ctx.state.conv, at, getattr(w, "conv_bias", None), exports=ctx.inputs.exports)
    dt_TR, B_TN, C_TN = linear(x_TM, w.x_proj).split((c.R, c.N, c.N), dim=1)
    if c.mixer_norms == "plain":
        dt_TR, B_TN, C_TN = (_normalized(t, c.mixer_eps) for t in (dt_TR, B_TN, C_TN))
    elif c.mixer_norms:
        given = ((dt_TR, w.dt_norm), (B_TN, w.b_norm), (C_TN, w.c_norm))
        dt_TR, B_TN, C_TN = (rms_norm(t, weight, c.mixer_eps) for t, weight in given)
    dt_TM = linear(dt_TR, w.dt_proj)
    y_TM = selective_scan(x_TM, dt_TM, w.decay, B_TN, C_TN, ctx.state.ssm, at, w.skip, w.dt_bias, ctx.inputs.exports)
    return linear(y_TM * torch.nn.functional.silu(gate_TM), w.out_proj, getattr(w, "out_proj_bias", None))


def _normalized(x: Tensor, eps: float) -> Tensor:
    """Rows with a root mean square of 1: a norm without a weight."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def embed_weights(c: Config) -> dict[str, Weight]:
    return {"tokens": token_table(c, "backbone.embeddings.weight")}


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    return {"norm": Weight((c.D,), (LAYER + "norm.weight",)), **mixer_weights(c, LAYER + "mixer.")}


def head_weights(c: Config) -> dict[str, Weight]:
    return {"norm": Weight((c.D,), ("backbone.norm_f.weight",)), "lm_head": head_matrix(c)}


def states(c: Config, layer_type: str) -> tuple[StateSpec, ...]:
    return mixer_states(c)


def embed(c: Config, w: SimpleNamespace, ctx: ForwardContext) -> tuple[Tensor, tuple[Tensor, ...]]:
    x_TD = embedding(ctx.inputs.token_ids, w.tokens)
    return x_TD.float() if c.wide else x_TD, ()


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    return x_TD + mix(c, w, rms_norm(x_TD.to(w.norm.dtype), w.norm, c.eps), ctx)


def norm(c: Config, w: SimpleNamespace, x_TD: Tensor) -> Tensor:
    return rms_norm(x_TD, w.norm, c.eps).to(w.norm.dtype)


def head(c: Config, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    return linear(norm(c, w, select_rows(x_TD, ctx.inputs.logits_indices)), w.lm_head)


GRAPH = Graph(
    lambda c: ("mamba",) * c.L, embed_weights, layer_weights, head_weights, embed, layer, head, states, norm=norm
)
MODEL = register_model(
    Model(
        architectures=("MambaForCausalLM", "FalconMambaForCausalLM"),
        config=from_hf,
        graphs=(GRAPH,),
        shardable=("M",),
    )
)
