"""EAGLE heads of Llama's kind: one layer over the model's last hidden state and the embedding of the next token.

As in the checkpoints yuhuili/EAGLE-*. The embedding and the head are the model's; training does not change them.
Source: Li et al. 2024, EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor

from graphllm.config.fields import strings, switch
from graphllm.ir import ForwardContext, Weight, register_model, select_rows
from graphllm.ir.model import Hidden
from graphllm.model_defs import llama
from graphllm.model_defs.common import HF, extended, main_head, main_tokens, named_too
from graphllm.ops.embeddings.embedding import embedding
from graphllm.ops.gemm.linear import linear

_FIRST = "first"  # the layer without a norm before its attention


@dataclass(frozen=True)
class Config(llama.Config):
    fc_bias: bool = False


def from_hf(hf: HF) -> Config:
    """The config of a head's ``config.json``. Its field "tensors" names the checkpoint's tensors, where they are known.
    Raises ConfigError for settings that are not supported."""
    c = llama.from_hf(hf, "Llama")
    return extended(
        Config,
        c,
        layer_types=(_FIRST, *c.layer_types[1:]),
        qkv_bias=c.qkv_bias or switch(hf, "qkv_bias", False),
        fc_bias="fc.bias" in strings(hf, "tensors"),
    )


def embed_weights(c: Config) -> dict[str, Weight]:
    bias = {"fc_bias": Weight((c.D,), ("fc.bias",))} if c.fc_bias else {}
    return {
        "tokens": main_tokens(c),
        "fc": Weight((c.D, 2 * c.D), ("fc.weight",)),
        "inv_freq": c.rope.weight(),
        **bias,
    }


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    weights = named_too(llama.layer_weights(c, layer_type), llama.LAYER, "layers.{layer}.")
    if layer_type == _FIRST:
        del weights["attn_norm"]
    return weights


def embed(c: Config, w: SimpleNamespace, ctx: ForwardContext) -> tuple[Tensor, tuple[Tensor, ...]]:
    angles = c.rope.table(ctx.inputs.positions, w.inv_freq)
    joint_T2D = torch.cat([embedding(ctx.inputs.token_ids, w.tokens), ctx.inputs.hidden], -1)
    return linear(joint_T2D, w.fc, getattr(w, "fc_bias", None)), angles


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    if layer_type != _FIRST:
        return llama.layer(c, layer_type, w, x_TD, ctx)
    return llama.feed_forward(c, w, x_TD + llama.attend(c, "full", w, x_TD, ctx))


GRAPH = replace(
    llama.GRAPH,
    task="draft",
    embed_weights=embed_weights,
    layer_weights=layer_weights,
    head_weights=lambda c: {"lm_head": main_head(c)},
    embed=embed,
    layer=layer,
    head=lambda c, w, x_TD, ctx: linear(select_rows(x_TD, ctx.inputs.logits_indices), w.lm_head),
    norm=None,
    hidden=lambda c, layers: Hidden((-1,), c.D, normed=True, width=c.D),
)
MODEL = register_model(
    replace(llama.MODEL, architectures=("EagleLlamaForCausalLM",), config=from_hf, method="eagle", graphs=(GRAPH,))
)
