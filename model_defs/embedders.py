"""Decoders without a language head, for embeddings: E5-Mistral, Qwen2 and Qwen3 embedders, and bare Llamas. The vector
of a prompt is the normalized last hidden state of its last token."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from torch import Tensor

from graphllm.ir import ForwardContext, Graph, Model, Weight, register_model, select_rows
from graphllm.model_defs import llama
from graphllm.model_defs.common import HF
from graphllm.ops.rms_norm import rms_norm


def from_hf(hf: HF) -> llama.Config:
    """The config of the decoder. Raises ConfigError for settings that are not supported."""
    return llama.from_hf({**hf, "architectures": [hf["architectures"][0].removesuffix("Model") + "ForCausalLM"]})


def bare(weights: dict[str, Weight]) -> dict[str, Weight]:
    """The same weights under the names that a decoder without a head saves them by."""
    return {
        name: replace(w, sources=tuple(s.removeprefix("model.") for s in w.sources if isinstance(s, str)))
        for name, w in weights.items()
    }


def head(c: llama.Config, w: SimpleNamespace, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
    return rms_norm(select_rows(x_TD, ctx.inputs.logits_indices), w.norm, c.eps)


register_model(
    Model(
        architectures=("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"),
        config=from_hf,
        graphs=(
            Graph(
                task="pool",
                layer_types=lambda c: c.layer_types,
                embed_weights=lambda c: bare(llama.embed_weights(c)),
                layer_weights=lambda c, layer_type: bare(llama.layer_weights(c, layer_type)),
                head_weights=lambda c: bare({"norm": llama.head_weights(c)["norm"]}),
                embed=llama.embed,
                layer=llama.layer,
                head=head,
                states=llama.states,
            ),
        ),
    )
)
