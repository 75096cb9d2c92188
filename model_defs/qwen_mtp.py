"""The layer that predicts the token after the next one (MTP) in checkpoints of Qwen3-Next, Qwen3.5 and Qwen3.5-MoE.

It joins the normalized embedding of the next token and the normalized hidden state of the model, and attends as the
model's own layers with attention do. It drafts several tokens by running again over its own output. Source: Qwen Team
2025, Qwen3-Next; Gloeckle et al. 2024 for the idea.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from graphllm.config import ConfigError
from graphllm.config.fields import whole
from graphllm.ir import ForwardContext, Weight, register_model
from graphllm.model_defs import eagle, llama, mimo, qwen3_5, qwen3_next
from graphllm.model_defs.common import HF, named_too, only
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.rms_norm import rms_norm

_PREFIX, _LAYER = "mtp.", "mtp.layers.{layer}."
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # of Qwen3-Next, and of Qwen3.5
_ONE_LAYER: dict[str, Any] = {
    "num_hidden_layers": 1, "layer_types": ["full_attention"], "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


def from_hf(hf: HF) -> qwen3_next.Config:
    """The config of the further layer. Raises ConfigError for a checkpoint without one, or with several."""
    for name in _COUNTS:
        if whole(hf, name, 1, ge=0) != 1:
            raise ConfigError(f"config.json: {name} is {hf[name]}; MTP needs a checkpoint with one such layer")
    only(hf, "mtp_use_dedicated_embeddings", False)
    family = qwen3_next if hf["architectures"][0] in qwen3_next.MODEL.architectures else qwen3_5
    return family.from_hf({**hf, **_ONE_LAYER})


def layer_weights(c: qwen3_next.Config, layer_type: str) -> dict[str, Weight]:
    named = {"token_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "final_norm": "norm"}
    norms = {name: Weight((c.D,), (f"{_PREFIX}{source}.weight",)) for name, source in named.items()}
    joint = {"fc": Weight((c.D, 2 * c.D), (_PREFIX + "fc.weight",))}
    return named_too(qwen3_next.layer_weights(c, layer_type), llama.LAYER, _LAYER) | norms | joint


def layer(c: qwen3_next.Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    *angles, tokens_TD = ctx.shared
    joint = [rms_norm(tokens_TD, w.token_norm, c.eps, 1.0), rms_norm(x_TD, w.hidden_norm, c.eps, 1.0)]
    x_TD = linear(torch.cat(joint, -1), w.fc)
    x_TD = qwen3_next.layer(c, layer_type, w, x_TD, ctx._replace(shared=tuple(angles)))
    return rms_norm(x_TD, w.final_norm, c.eps, 1.0)


register_model(
    replace(
        qwen3_next.MODEL,
        architectures=("QwenMTPModel",),
        config=from_hf,
        method="mtp",
        part_of=(*qwen3_next.MODEL.architectures, *qwen3_5.MODEL.architectures),
        graphs=(
            replace(
                eagle.GRAPH,
                embed_weights=mimo.mtp_embed_weights,
                layer_weights=layer_weights,
                embed=mimo.mtp_embed,
                layer=layer,
                states=qwen3_next.states,
            ),
        ),
    )
)
