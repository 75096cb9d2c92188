"""A config.json as families read it: with the engine's longest context, and a note of the fields that they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphllm.config.fields import MAX_MODEL_LEN, READ, section
from graphllm.weights.checkpoint.checkpoint import DRAFT
from graphllm.weights.checkpoint.inert_fields import CONFIG, QUANTIZATION, ROPE, unknown_fields
from graphllm.weights.plan.schemes import unread_settings

_ROPES = ("rope_parameters", "rope_scaling")
_ATTENTION = "attn_config"  # of MPT


def described(model_config: Mapping[str, Any], max_model_len: int) -> dict[str, Any]:
    """For one compilation, and for its draft model."""
    made = {**model_config, MAX_MODEL_LEN: max_model_len, READ: set()}
    drafts = model_config.get(DRAFT)
    return made if drafts is None else {**made, DRAFT: {**drafts, MAX_MODEL_LEN: max_model_len, READ: set()}}


def unread_fields(described: Mapping[str, Any]) -> list[str]:
    """Fields without effect that nobody has asked for, once the families have read the rest."""
    found = _unread(described, "")
    return found if described.get(DRAFT) is None else [*found, *_unread(described[DRAFT], "the draft model's ")]


def _unread(described: Mapping[str, Any], owner: str) -> list[str]:
    used = described[READ]
    names = unknown_fields({n: v for n, v in described.items() if n != READ}, CONFIG, {*used, *_ROPES})
    for name in _ROPES:
        ropes = section(described, name)
        for rope in (ropes, *(v for v in ropes.values() if isinstance(v, Mapping))):
            plain = {n: v for n, v in rope.items() if not isinstance(v, Mapping)}
            names += [f"{name}.{n}" for n in unknown_fields(plain, ROPE, used)]
    inner = section(described, _ATTENTION)
    names += [f"{_ATTENTION}.{n}" for n in unknown_fields(inner, CONFIG, used)]
    quantized = unread_settings(described)
    names += [f"quantization_config.{n}" for n in unknown_fields(quantized, QUANTIZATION)]
    return [f"{owner}{name}" for name in dict.fromkeys(names)]
