"""Experts that some checkpoints store stacked, and others one by one: the tensors of each, where they lie."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from graphllm.config.fields import strings
from graphllm.weights.checkpoint.tensor_info import TensorInfo

ARCHITECTURES = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
_STACK = re.compile(r"(.+\.mlp\.experts\.)(gate_up|down)_proj")
_PARTS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}


def has_stacks(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a family whose checkpoints may store experts stacked."""
    names = strings(config, "architectures")
    return bool(names) and names[0] in ARCHITECTURES


def single_experts(tensors: Mapping[str, TensorInfo]) -> Mapping[str, TensorInfo]:
    """The same tensors, with a matrix for each expert in place of stacks [experts, rows, inner]: gates and ups are the
    halves of an expert's rows."""
    found = {}
    for name, tensor in tensors.items():
        match = _STACK.fullmatch(name)
        parts = _PARTS[match[2]] if match else ()
        if match is None or len(tensor.shape) != 3 or tensor.shape[1] % len(parts):
            found[name] = tensor
            continue
        count, rows, inner = tensor.shape
        nbytes = tensor.nbytes // (count * len(parts))
        for i in range(count * len(parts)):
            part = f"{match[1]}{i // len(parts)}.{parts[i % len(parts)]}.weight"
            shape, offset = (rows // len(parts), inner), tensor.offset + i * nbytes
            found[part] = replace(tensor, shape=shape, offset=offset, nbytes=nbytes)
    return found
