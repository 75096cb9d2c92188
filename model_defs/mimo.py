"""MiMo: Qwen2's layers, and in the same checkpoint a layer that predicts the token after the next one (MTP).

That layer joins the normalized hidden state of the model and the normalized embedding of the next token. It drafts
several tokens by running again over its own output. Source: Xiaomi 2025, MiMo; Gloeckle et al. 2024 for the idea.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor

from graphllm.config import ConfigError
from graphllm.config.fields import whole
from graphllm.ir import ForwardContext, Weight, register_model
from graphllm.model_defs import eagle, llama
from graphllm.model_defs.common import HF, main_tokens, named_too
from graphllm.ops.embeddings.embedding import embedding
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.rms_norm import rms_norm

LAYER = "model.mtp_layers.{layer}."


def from_hf(hf: HF) -> llama.Config:
    """The config of a ``config.json``. Raises ConfigError for settings that are not supported."""
    return llama.from_hf(hf, "Qwen2")


def mtp_from_hf(hf: HF) -> llama.Config:
    """That of the further layer. Raises ConfigError for a checkpoint without one, or with several."""
    if whole(hf, "num_nextn_predict_layers", 0, ge=0) != 1:
        raise ConfigError("config.json: num_nextn_predict_layers is not 1; MTP needs a checkpoint with one such layer")
    return llama.from_hf({**hf, "num_hidden_layers": 1}, "Qwen2")


def mtp_embed_weights(c: llama.Config) -> dict[str, Weight]:
    return {"tokens": main_tokens(c), "inv_freq": c.rope.weight()}


def mtp_layer_weights(c: llama.Config, layer_type: str) -> dict[str, Weight]:
    norms = {n: Weight((c.D,), (f"{llama.LAYER}{n}_layernorm.weight",)) for n in ("token", "hidden", "final")}
    joint = {"input_proj": Weight((c.D, 2 * c.D), (llama.LAYER + "input_proj.weight",))}
    return named_too(llama.layer_weights(c, layer_type) | norms | joint, llama.LAYER, LAYER)


def mtp_embed(c: llama.Config, w: SimpleNamespace, ctx: ForwardContext) -> tuple[Tensor, tuple[Tensor, ...]]:
    angles = c.rope.table(ctx.inputs.positions, w.inv_freq)
    return ctx.inputs.hidden, (*angles, embedding(ctx.inputs.token_ids, w.tokens))


def mtp_layer(c: llama.Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    *angles, tokens_TD = ctx.shared
    joint = [rms_norm(x_TD, w.hidden, c.eps), rms_norm(tokens_TD, w.token, c.eps)]
    x_TD = linear(torch.cat(joint, -1), w.input_proj)
    return rms_norm(llama.layer(c, layer_type, w, x_TD, ctx._replace(shared=tuple(angles))), w.final, c.eps)


register_model(replace(llama.MODEL, architectures=("MiMoForCausalLM",), config=from_hf))
register_model(
    replace(
        eagle.MODEL,
        architectures=("MiMoMTPModel",),
        config=mtp_from_hf,
        method="mtp",
        part_of=("MiMoForCausalLM",),
        graphs=(
            replace(
                eagle.GRAPH,
                embed_weights=mtp_embed_weights,
                layer_weights=mtp_layer_weights,
                embed=mtp_embed,
                layer=mtp_layer,
            ),
        ),
    )
)
