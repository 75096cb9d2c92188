"""How a checkpoint is quantized whose config.json does not say it: files that its quantizer wrote beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graphllm.config.fields import read_json

_METHODS = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
_OLDER = {"w_bit": "bits", "q_group_size": "group_size"}  # AutoAWQ's names


def with_quantization(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A config.json with the field quantization_config where one of these files says it. Raises ConfigError for a
    damaged one."""
    if "quantization_config" in config:
        return config
    for name, method in _METHODS.items():
        if (found := read_json(folder / name)) is not None:
            told = {_OLDER.get(field, field): value for field, value in found.items()}
            return {**config, "quantization_config": {"quant_method": method, **told}}
    return config
