"""Medusa heads: each guesses, only from the model's last hidden state, the token one place further on.

As in checkpoints for vLLM (``blocks.i.layers.j``, ``lm_heads.i``) and in the checkpoints of the method's authors
(``i.j.linear``, ``i.<layers>``). Source: Cai et al. 2024, Medusa: Simple LLM Inference Acceleration Framework with
Multiple Decoding Heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import silu

from graphllm.config.fields import strings, switch, whole
from graphllm.ir import ForwardContext, Graph, Model, Weight, register_model, select_rows
from graphllm.ir.model import Drafts, Hidden
from graphllm.model_defs.common import HF
from graphllm.ops.gemm.linear import linear
from graphllm.weights.plan.expr import Read

_MOST = 64


@dataclass(frozen=True)
class Config:
    """heads: drafts of one run. blocks: residual blocks of a head. kept: tokens that they draft, the most frequent
    ones, which the tensor "token_map" names."""

    D: int
    V: int
    max_len: int
    heads: int
    blocks: int
    bias: bool
    kept: int


def from_hf(hf: HF) -> Config:
    """The config of the heads' ``config.json``. Raises ConfigError for settings that are not supported."""
    heads, blocks = "num_heads", "num_hidden_layers"
    if "medusa_num_heads" in hf:
        heads, blocks = "medusa_num_heads", "medusa_num_layers"
    biased = any(n.endswith(".bias") for n in strings(hf, "tensors"))
    return Config(
        D=whole(hf, "hidden_size"),
        V=whole(hf, "vocab_size"),
        max_len=2**31 - 1,
        heads=whole(hf, heads, le=_MOST),
        blocks=whole(hf, blocks, 1, le=_MOST),
        bias=biased or switch(hf, "medusa_fc_bias", False),
        kept=whole(hf, "truncated_vocab_size", whole(hf, "vocab_size"), whole(hf, "vocab_size")),
    )


def head_weights(c: Config) -> dict[str, Weight]:
    weights = {}
    for i in range(c.heads):
        for j in range(c.blocks):
            names = (f"blocks.{i}.layers.{j}", f"medusa_heads.{i}.{j}.linear", f"{i}.{j}.linear")
            weights[f"block_{i}_{j}"] = Weight((c.D, c.D), (tuple(f"{n}.weight" for n in names),))
            if c.bias:
                weights[f"bias_{i}_{j}"] = Weight((c.D,), (tuple(f"{n}.bias" for n in names),))
        heads = (f"lm_heads.{i}", f"medusa_heads.{i}.{c.blocks}", f"{i}.{c.blocks}")
        weights[f"lm_head_{i}"] = Weight((c.kept, c.D), (tuple(f"{n}.weight" for n in heads),))
    if c.kept != c.V:
        weights["token_map"] = Weight((c.kept,), expr=Read(("token_map",), (c.kept,), "int64"), dtype="float32")
    return weights


def head(c: Config, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Drafts:
    x_SD = select_rows(x_TD, ctx.inputs.logits_indices)
    ids = None if c.kept == c.V else w.token_map.round().to(torch.int64)
    return Drafts(tuple(_logits(c, w, x_SD, i) for i in range(c.heads)), ids)


def _logits(c: Config, w: SimpleNamespace, x_SD: Tensor, head: int) -> Tensor:
    for j in range(c.blocks):
        x_SD = x_SD + silu(linear(x_SD, getattr(w, f"block_{head}_{j}"), getattr(w, f"bias_{head}_{j}", None)))
    return linear(x_SD, getattr(w, f"lm_head_{head}"))


GRAPH = Graph(
    task="draft",
    layer_types=lambda c: (),
    embed_weights=lambda c: {},
    layer_weights=lambda c, layer_type: {},
    head_weights=head_weights,
    embed=lambda c, w, ctx: (ctx.inputs.hidden, ()),
    layer=lambda c, layer_type, w, x_TD, ctx: x_TD,
    head=head,
    hidden=lambda c, layers: Hidden((-1,), c.D, normed=True, width=c.D),
    drafts_at_once=lambda c: c.heads,
)
register_model(Model(architectures=("MedusaModel",), config=from_hf, method="medusa", graphs=(GRAPH,)))
