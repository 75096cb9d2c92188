"""Whole multimodal checkpoints with a text model of a family here: they run as that model, and their other parts are
not read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from graphllm.config.fields import section, strings
from graphllm.weights.checkpoint.tensor_info import TensorInfo

ARCHITECTURES = (
    "Gemma3ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
_INNER = re.compile(r"(?:model\.)?language_model\.(?:model\.)?(.+)|((?:lm_head|mtp)\..+)")
# Fields next to text_config that say something of the text model, too.
_SHARED = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "quantization_config")


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of such a checkpoint."""
    names = strings(config, "architectures")
    return bool(names) and names[0] in ARCHITECTURES


def text_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config.json of the text model, which its model_type names; None for a checkpoint of another kind."""
    if not is_multimodal(config):
        return None
    shared = {name: config[name] for name in _SHARED if config.get(name) is not None}
    tied = config.get("tie_word_embeddings", True)
    text = {n: v for n, v in section(config, "text_config").items() if n != "architectures"}
    return {**text, **shared, "tie_word_embeddings": tied}


def text_tensors(tensors: Mapping[str, TensorInfo]) -> Mapping[str, TensorInfo]:
    """The tensors of the text model of such a checkpoint, by the names that they have in a text model's checkpoint."""
    found = {}
    for name, tensor in tensors.items():
        if (match := _INNER.fullmatch(name)) is not None:
            inner = match[2] or match[1]
            found[inner if inner.startswith(("lm_head.", "mtp.")) else f"model.{inner}"] = tensor
    return found
