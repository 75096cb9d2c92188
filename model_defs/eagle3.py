"""EAGLE-3 heads of Llama's kind: one layer over hidden states of three layers of the model and the next token.

As in the checkpoints yuhuili/EAGLE3-* and of SpecForge: the layer's tensors are "midlayer.*", its attention reads the
normalized embedding and the normalized hidden state, and it drafts tokens of a vocabulary of its own. Source: Li et
al. 2025, EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from graphllm.config import ConfigError
from graphllm.config.fields import raw, section, strings, switch, whole
from graphllm.ir import ForwardContext, Graph, Weight, register_model, select_rows
from graphllm.ir.model import Drafts, Hidden
from graphllm.model_defs import eagle, llama
from graphllm.model_defs.common import HF, extended, main_tokens, named_too
from graphllm.ops.embeddings.embedding import embedding
from graphllm.ops.gemm.linear import linear
from graphllm.ops.norms.rms_norm import rms_norm
from graphllm.weights.plan.expr import Read


@dataclass(frozen=True)
class Config(llama.Config):
    draft_vocab: int = 0  # tokens that it drafts
    target_width: int = 0  # of the main model
    hidden_layers: tuple[int, ...] = ()  # the main model's layers that it reads, from 1; empty: the usual three
    norm_before_residual: bool = False
    norm_output: bool = False  # the next draft reads the normalized state
    fc_norm: bool = False  # each hidden state of the main model is normalized
    norm_before_fc: bool = False  # all hidden states of the main model are normalized as one row
    own_embedding: bool = False


def from_hf(hf: HF) -> Config:
    """The config of a head's ``config.json``. Its field "tensors" names the checkpoint's tensors, where they are known.
    Raises ConfigError for settings that are not supported."""
    c = llama.from_hf(hf, "Llama")
    if len(c.layer_types) != 1:
        raise ConfigError(f"config.json: num_hidden_layers is {len(c.layer_types)}; EAGLE-3 heads have one layer")
    layers = raw(hf, "eagle_aux_hidden_state_layer_ids")
    layers = section(hf, "eagle_config").get("eagle_aux_hidden_state_layer_ids") if layers is None else layers
    if layers is not None and not (isinstance(layers, list) and layers and all(type(i) is int for i in layers)):
        raise ConfigError(f"config.json: eagle_aux_hidden_state_layer_ids is {layers!r:.80}; give a list of layers")
    return extended(
        Config,
        c,
        draft_vocab=whole(hf, "draft_vocab_size", c.V, c.V),
        target_width=whole(hf, "target_hidden_size", c.D, c.D),
        hidden_layers=tuple(layers or ()),
        norm_before_residual=_switch(hf, "norm_before_residual"),
        norm_output=_switch(hf, "norm_output"),
        fc_norm=_switch(hf, "fc_norm"),
        norm_before_fc=_switch(hf, "norm_before_fc"),
        own_embedding="embed_tokens.weight" in strings(hf, "tensors"),
    )


def _switch(hf: HF, name: str) -> bool:
    """A switch that some programs write into the section eagle_config."""
    return switch({**section(hf, "eagle_config"), **hf}, name, False)


def hidden(c: Config, layers: int) -> Hidden:
    """Usually the outputs of the second layer, one in the middle and the third last one."""
    counted = c.hidden_layers or tuple(min(max(i, 1), layers) for i in (2, layers // 2, layers - 3))
    return Hidden(tuple(i - 1 for i in counted), c.target_width, normed=False, width=c.D)


def _parts(c: Config) -> int:
    return len(c.hidden_layers) or 3


def embed_weights(c: Config) -> dict[str, Weight]:
    own = Weight((c.V, c.D), ("embed_tokens.weight",), shard="vocab")
    return {"tokens": own if c.own_embedding else main_tokens(c), "inv_freq": c.rope.weight()}


def layer_weights(c: Config, layer_type: str) -> dict[str, Weight]:
    twice = replace(c, D=2 * c.D)
    weights = llama.layer_weights(c, layer_type) | {"qkv": llama.layer_weights(twice, layer_type)["qkv"]}
    weights["hidden_norm"] = Weight((c.D,), (llama.LAYER + "hidden_norm.weight",))
    weights = named_too(weights, llama.LAYER, "midlayer.", "layers.{layer}.")
    return weights | ({"norm": Weight((c.D,), ("norm.weight",))} if c.norm_output else {})


def head_weights(c: Config) -> dict[str, Weight]:
    offsets = {}
    if c.draft_vocab != c.V:
        offsets["d2t"] = Weight((c.draft_vocab,), expr=Read(("d2t",), (c.draft_vocab,), "int64"), dtype="float32")
    return {
        **({} if c.norm_output else {"norm": Weight((c.D,), ("norm.weight",))}),
        "lm_head": Weight((c.draft_vocab, c.D), ("lm_head.weight",), shard="vocab"),
        **offsets,
    }


def embed(c: Config, w: SimpleNamespace, ctx: ForwardContext) -> tuple[Tensor, tuple[Tensor, ...]]:
    angles = c.rope.table(ctx.inputs.positions, w.inv_freq)
    return ctx.inputs.hidden, (*angles, embedding(ctx.inputs.token_ids, w.tokens))


def layer(c: Config, layer_type: str, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    *angles, tokens_TD = ctx.shared
    h_TD = rms_norm(x_TD, w.hidden_norm, c.eps)
    joint_T2D = torch.cat([rms_norm(tokens_TD, w.attn_norm, c.eps), h_TD], -1)
    added_TD = llama.attend(c, layer_type, w, joint_T2D, ctx._replace(shared=tuple(angles)))
    out_TD = llama.feed_forward(c, w, (h_TD if c.norm_before_residual else x_TD) + added_TD)
    return llama.norm(c, w, out_TD) if c.norm_output else out_TD


def head(c: Config, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Any:
    x_SD = select_rows(x_TD, ctx.inputs.logits_indices)
    logits_SV = linear(x_SD if c.norm_output else llama.norm(c, w, x_SD), w.lm_head)
    if c.draft_vocab == c.V:
        return logits_SV
    ids_V = torch.arange(c.draft_vocab, device=x_TD.device) + w.d2t.round().to(torch.int64)
    return Drafts((logits_SV,), ids_V)


def project_weights(c: Config) -> dict[str, Weight]:
    weights = {"fc": Weight((c.D, _parts(c) * c.target_width), ("fc.weight",))}
    if c.fc_norm:
        norms = tuple(f"fc_norm.{i}.weight" for i in range(_parts(c)))
        weights["fc_norm"] = Weight((_parts(c) * c.target_width,), norms, (c.target_width,) * _parts(c))
    if c.norm_before_fc:
        weights["input_norm"] = Weight((_parts(c) * c.target_width,), ("input_norm.weight",))
    return weights


def project(c: Config, w: SimpleNamespace, hidden_TD: Tensor) -> Tensor:
    if c.fc_norm:
        parts = zip(hidden_TD.chunk(_parts(c), -1), w.fc_norm.chunk(_parts(c)), strict=True)
        hidden_TD = torch.cat([rms_norm(part_TD, norm, c.eps) for part_TD, norm in parts], -1)
    if c.norm_before_fc:
        hidden_TD = rms_norm(hidden_TD, w.input_norm, c.eps)
    return linear(hidden_TD, w.fc)


GRAPH = Graph(
    lambda c: c.layer_types, embed_weights, layer_weights, head_weights, embed, layer, head, llama.states,
    hidden=hidden, project_weights=project_weights, project=project, task="draft",
)  # fmt: skip
register_model(
    replace(
        eagle.MODEL,
        architectures=("Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"),
        config=from_hf,
        method="eagle3",
        graphs=(GRAPH,),
    )
)
