"""Mamba2: layers of a short convolution and a state-space recurrence with one decay a head, and no attention.

`Mixer` and the functions that take it are those of hybrids, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from graphllm.config import ConfigError
from graphllm.config.fields import MOST, number, raw, switch, whole
from graphllm.ir import ForwardContext, Graph, Model, StateSpec, Weight, register_model, select_rows
from graphllm.model_defs.common import HF, MOST_LAYERS, head_matrix, only, with_bias
from graphllm.ops.embeddings.embedding import embedding
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.gated_rms_norm import gated_rms_norm
from graphllm.ops.norms.rms_norm import rms_norm
from graphllm.ops.recurrent.causal_conv import causal_conv
from graphllm.ops.recurrent.slots import Slots
from graphllm.ops.recurrent.ssd_scan import ssd_scan
from graphllm.weights.plan.expr import Each, Read, Reshape

Order = Literal["gate first", "gate last", ""]


@dataclass(frozen=True)
class Mixer:
    """A layer's recurrent part: D width, H heads of P, G groups of N, a convolution over W tokens.

    E: numbers of a group that the norm takes together, on all ranks that have heads of it.
    bias, out_bias, conv_bias: of the projections, and of the convolution.
    norm: whether the gate comes before the norm or after it; without a norm there is only the gate.
    limits: least and largest step, 0 for no largest one.
    scales: of what the projection gives: gate, x, B, C and steps; none where it is empty.
    """

    D: int
    H: int
    P: int
    G: int
    N: int
    E: int
    W: int
    bias: bool
    out_bias: bool
    conv_bias: bool
    eps: float
    limits: tuple[float, float]
    norm: Order = "gate first"
    scales: tuple[float, ...] = ()

    @property
    def inner(self) -> int:
        """Width of what the heads give."""
        return self.H * self.P

    @property
    def channels(self) -> int:
        """Of the convolution: what the heads take, and B and C of each group."""
        return self.inner + 2 * self.G * self.N

    @property
    def segments(self) -> tuple[int, int, int]:
        """Channels of the heads, of B and of C."""
        return self.inner, self.G * self.N, self.G * self.N


def time_step_limits(hf: HF, name: str = "time_step_limit") -> tuple[float, float]:
    """Least and largest step of a config; null is no limit. Raises ConfigError for anything but two numbers in
    order."""
    given = raw(hf, name)
    if given is None:
        return 0.0, 0.0
    numbers = isinstance(given, (list, tuple)) and len(given) == 2 and all(type(n) in (int, float) for n in given)
    if not numbers or not 0 <= given[0] < given[1]:
        raise ConfigError(f"config.json: {name} is {given!r}; give the least and the largest step, such as [0.0, 0.1]")
    return float(given[0]), 0.0 if given[1] == float("inf") else float(given[1])


def mixer_weights(c: Mixer, prefix: str) -> dict[str, Weight]:
    """prefix: of the checkpoint's names, such as "backbone.layers.{layer}.mixer."."""

    def of(name: str) -> Callable[[str], tuple[str, ...]]:
        return lambda leaf: (f"{prefix}{name}.{leaf}",)

    def by_channel(shape: tuple[int, ...], **made: Any) -> Weight:
        return Weight(shape, segments=c.segments, shard="output", heads=(c.H, c.G, c.G), **made)

    rows, heads = (c.inner, *c.segments, c.H), (c.H, c.H, c.G, c.G, c.H)
    into = with_bias("in_proj", (sum(rows), c.D), of("in_proj"), rows, "output")
    out = with_bias("out_proj", (c.D, c.inner), of("out_proj"), shard="input")
    conv = Reshape(Read((f"{prefix}conv1d.weight",), (c.channels, 1, c.W)), (c.channels, c.W))
    by_head = Weight((c.H,), dtype="float32", shard="output", heads=(c.H,))
    weights = {
        **{name: replace(weight, heads=heads) for name, weight in into.items()},
        "conv": by_channel((c.channels, c.W), expr=conv),
        "conv_bias": by_channel((c.channels,), sources=(f"{prefix}conv1d.bias",)),
        "A": replace(by_head, expr=Each("-exp", Read((f"{prefix}A_log",), (c.H,)))),
        "skip": replace(by_head, sources=(f"{prefix}D",)),
        "dt_bias": replace(by_head, sources=(f"{prefix}dt_bias",)),
        "gated_norm": Weight((c.inner,), (f"{prefix}norm.weight",), shard="output", heads=(c.H,)),
        **out,
    }
    absent = {"in_proj_bias": not c.bias, "conv_bias": not c.conv_bias, "gated_norm": not c.norm,
              "out_proj_bias": not c.out_bias}  # fmt: skip
    return {name: weight for name, weight in weights.items() if not absent.get(name)}


def mixer_states(c: Mixer) -> tuple[StateSpec, ...]:
    """The last inputs of the convolution, and what the heads remember."""
    return (
        StateSpec("conv", "slot", (c.W - 1, c.channels), retention="last"),
        StateSpec("ssm", "slot", (c.H, c.P, c.N), "recurrent", retention="last", int8_over=-2),
    )


def mix(c: Mixer, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    """The layer's recurrent part: [T, D]."""
    at = Slots.of(ctx.inputs)
    projected = linear(x_TD, w.in_proj, getattr(w, "in_proj_bias", None))
    if c.scales:
        parts = torch.split(projected, [c.inner, *c.segments, c.H], 1)
        projected = torch.cat([part * scale for part, scale in zip(parts, c.scales, strict=True)], 1)
    gate, conved, dt_TH = torch.split(projected, [c.inner, c.channels, c.H], 1)
    conved = causal_conv(conved, w.conv, ctx.state.conv, at, getattr(w, "conv_bias", None), exports=ctx.inputs.exports)
    x, B, C = torch.split(conved, list(c.segments), 1)
    heads, B_TGN, C_TGN = x.unflatten(1, (c.H, c.P)), B.unflatten(1, (c.G, c.N)), C.unflatten(1, (c.G, c.N))
    y = ssd_scan(heads, dt_TH, w.A, B_TGN, C_TGN, ctx.state.ssm, at, w.skip, w.dt_bias, *c.limits, ctx.inputs.exports)
    if c.norm:
        ranks = c.G * c.E // c.inner  # with heads of a group
        gated = gated_rms_norm(y.flatten(1), gate, w.gated_norm, c.G, c.eps, c.norm == "gate first", ranks)
    else:
        gated = y.flatten(1) * torch.nn.functional.silu(gate)
    return linear(gated, w.out_proj, getattr(w, "out_proj_bias", None))


@dataclass(frozen=True)
class Config:
    """D width, V vocabulary, L layers."""

    D: int
    V: int
    L: int
    max_len: int
    eps: float
    tied: bool
    mixer: Mixer


def from_hf(hf: HF) -> Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    only(hf, "hidden_act", "silu")
    D, H, P = whole(hf, "hidden_size", 4096), whole(hf, "num_heads", 128), whole(hf, "head_dim", 64)
    inner = whole(hf, "expand", 2) * D
    if inner != H * P:
        raise ConfigError(
            f"config.json: num_heads {H} of head_dim {P} are {H * P} numbers; hidden_size times expand is {inner}"
        )
    G = whole(hf, "n_groups", 8)
    if H % G:
        raise ConfigError(f"config.json: num_heads is {H}, which is no multiple of n_groups {G}; change one of them")
    eps = number(hf, "layer_norm_epsilon", 1e-5, ge=0, le=1)
    return Config(
        D=D,
        V=whole(hf, "vocab_size", 32768),
        L=whole(hf, "num_hidden_layers", 64, le=MOST_LAYERS),
        max_len=MOST,
        eps=eps,
        tied=switch(hf, "tie_word_embeddings", False),
        mixer=Mixer(
            D=D, H=H, P=P, G=G, N=whole(hf, "state_size", 128), E=inner // G, W=whole(hf, "conv_kernel", 4, ge=2),
            bias=(bias := switch(hf, "use_bias", False)), out_bias=bias, conv_bias=switch(hf, "use_conv_bias", True),
            eps=eps, limits=time_step_limits(hf),
        ),
    )  # fmt: skip


def embed_weights(c: Config) -> dict[str, Weight]:
    names = ("backbone.embeddings.weight", "backbone.embedding.weight")
    return {"tokens": Weight((c.V, c.D), ((*names, "lm_head.weight") if c.tied else names,), shard="vocab")}


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    start = "backbone.layers.{layer}."
    return {"norm": Weight((c.D,), (f"{start}norm.weight",)), **mixer_weights(c.mixer, f"{start}mixer.")}


def head_weights(c: Config) -> dict[str, Weight]:
    return {"norm": Weight((c.D,), ("backbone.norm_f.weight",)), "lm_head": head_matrix(c)}


def embed(c: Config, w: SimpleNamespace, ctx: ForwardContext) -> tuple[Tensor, tuple[Tensor, ...]]:
    return embedding(ctx.inputs.token_ids, w.tokens), ()


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    return x_TD + mix(c.mixer, w, rms_norm(x_TD, w.norm, c.eps), ctx)


def norm(c: Config, w: SimpleNamespace, x_TD: Tensor) -> Tensor:
    return rms_norm(x_TD, w.norm, c.eps)


def head(c: Config, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    return linear(norm(c, w, select_rows(x_TD, ctx.inputs.logits_indices)), w.lm_head)


GRAPH = Graph(
    layer_types=lambda c: ("mamba2",) * c.L,
    embed_weights=embed_weights,
    layer_weights=layer_weights,
    head_weights=head_weights,
    embed=embed,
    layer=layer,
    head=head,
    states=lambda c, layer_type: mixer_states(c.mixer),
    norm=norm,
)
SHARDABLE, SHARED = ("mixer.H", "mixer.G"), ("mixer.G",)  # of configs with a mixer
MODEL = register_model(
    Model(
        architectures=("Mamba2ForCausalLM",), config=from_hf, graphs=(GRAPH,), shardable=SHARDABLE, shared=SHARED
    )
)  # fmt: skip
