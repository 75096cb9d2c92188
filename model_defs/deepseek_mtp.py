"""The layer that predicts the token after the next one (MTP) in checkpoints of DeepSeek-V3's kind and of GLM-4.5's.

It is one more layer of the model, with experts. Its input joins the normalized embedding of the next token and the
normalized hidden state of the model. It drafts several tokens by running again over its own normalized output. Source:
DeepSeek-AI 2024, DeepSeek-V3, section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from graphllm.config import ConfigError
from graphllm.config.fields import strings, whole
from graphllm.ir import ForwardContext, StateSpec, Weight, register_model
from graphllm.ir.model import Graph, Hidden, Model
from graphllm.model_defs import deepseek, deepseek_moe, eagle, glm4_moe, llama, mimo
from graphllm.model_defs.common import HF, main_head, main_tokens, named_too
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.rms_norm import rms_norm

_TOKENS, _HEAD = "mtp.embed_tokens.weight", "mtp.lm_head.weight"
_ONE_LAYER: dict[str, Any] = {
    "num_hidden_layers": 1, "first_k_dense_replace": 0, "layer_types": None, "mlp_layer_types": None,
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """block: of the layer, as of a model with no other one.

    V: tokens of the vocabulary.
    max_len: positions that the checkpoint was made for.
    own_tokens, own_head: whether the embedding and the head are other ones than the model's.
    """

    block: deepseek_moe.Config
    V: int
    max_len: int
    own_tokens: bool
    own_head: bool


def of_family(family: Model, name: str) -> Model:
    """What drafts with the further layer of a family's checkpoints. name: its architecture."""
    main = family.graphs[0]

    def config(hf: HF) -> Config:
        if (count := whole(hf, "num_nextn_predict_layers", 0, ge=0)) != 1:
            raise ConfigError(
                f"config.json: num_nextn_predict_layers is {count}; MTP needs a checkpoint with one such layer"
            )
        block, stored = family.config({**hf, **_ONE_LAYER}), strings(hf, "tensors")
        return Config(block, block.V, block.max_len, _TOKENS in stored, _HEAD in stored)

    def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
        D = c.block.D
        named = {"token_norm": "enorm", "hidden_norm": "hnorm", "final_norm": "shared_head.norm"}
        own = {n: Weight((D,), (f"{llama.LAYER}{source}.weight",)) for n, source in named.items()}
        own["joint"] = Weight((D, 2 * D), (llama.LAYER + "eh_proj.weight",))
        return named_too(main.layer_weights(c.block, layer_type) | own, llama.LAYER, mimo.LAYER)

    def states(c: Config, layer_type: str) -> tuple[StateSpec, ...]:
        return main.states(c.block, layer_type)

    def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
        *angles, tokens_TD = ctx.shared
        eps = c.block.eps
        joint = [rms_norm(tokens_TD, w.token_norm, eps), rms_norm(x_TD, w.hidden_norm, eps)]
        x_TD = linear(torch.cat(joint, -1), w.joint)
        x_TD = main.layer(c.block, layer_type, w, x_TD, ctx._replace(shared=tuple(angles)))
        return rms_norm(x_TD, w.final_norm, eps)

    graph = replace(_GRAPH, layer_weights=layer_weights, layer=layer, states=states)
    return replace(
        family, architectures=(name,), config=config, graphs=(graph,), states=lambda c: family.states(c.block),
        method="mtp", part_of=family.architectures, inner="block",
    )  # fmt: skip


def embed_weights(c: Config) -> dict[str, Weight]:
    return {
        "tokens": _table(c, _TOKENS) if c.own_tokens else main_tokens(c.block),
        "inv_freq": c.block.rope.weight(),
    }


def head_weights(c: Config) -> dict[str, Weight]:
    return {"lm_head": _table(c, _HEAD) if c.own_head else main_head(c.block)}


def _table(c: Config, name: str) -> Weight:
    return Weight((c.V, c.block.D), (name,), shard="vocab")


_GRAPH: Graph = replace(
    eagle.GRAPH,
    layer_types=lambda c: c.block.layer_types,
    embed_weights=embed_weights,
    head_weights=head_weights,
    embed=lambda c, w, ctx: mimo.mtp_embed(c.block, w, ctx),
    hidden=lambda c, layers: Hidden((-1,), c.block.D, normed=True, width=c.block.D),
)
register_model(of_family(deepseek.MODEL, "DeepSeekMTPModel"))
register_model(of_family(glm4_moe.MODEL, "Glm4MoeMTPModel"))
