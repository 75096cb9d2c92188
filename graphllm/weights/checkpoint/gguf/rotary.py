"""The rotary embedding of a GGUF file as the fields of a config.json."""

from __future__ import annotations

import math
from typing import Any

from graphllm.weights.checkpoint.gguf.facts import Facts
from graphllm.weights.checkpoint.gguf.header import Tensor

_FACTORS = "rope_freqs.weight"  # what Llama 3.1 and later divide the frequencies by
_LONG = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
FACTORS = (_FACTORS, *_LONG.values())  # tensors that no checkpoint has
_SCALING = "rope.scaling."
# config.json's names of the numbers of YaRN, by the file's keys.
_YARN = {
    "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor",
}  # fmt: skip


def rotary(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling. Raises WeightError for a kind that is not read."""
    base = facts.get("rope.freq_base", 10000.0)
    return {"rope_theta": base, "rope_scaling": _scaling(facts, base)} | _length(facts)


def partly_rotary(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    """The same of families that may rotate a part of each head."""
    dims, width = facts.get("rope.dimension_count"), facts.head_dim()
    part = {} if dims in (None, 0, width) else {"partial_rotary_factor": dims / width}
    return rotary(facts, config) | part


def two_bases(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    """The same of Gemma 3, whose layers with a window have a base of their own."""
    return rotary(facts, config) | {"rope_local_base_freq": facts.get("rope.freq_base_swa", 10000.0)}


def latent_rotary(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    """The same of DeepSeek, whose YaRN has the factor of its logarithm in the file. Published models have equal mscale
    and mscale_all_dim."""
    found, log = rotary(facts, config), facts.get(f"{_SCALING}yarn_log_multiplier")
    if found["rope_scaling"] is not None and log:
        found["rope_scaling"] |= {"mscale": 10 * log, "mscale_all_dim": 10 * log}
    return found


def _length(facts: Facts) -> dict[str, Any]:
    first = facts.get(f"{_SCALING}original_context_length")
    return {"original_max_position_embeddings": first} if first and facts.tensor(_LONG["long_factor"]) else {}


def _scaling(facts: Facts, base: float) -> dict[str, Any] | None:
    """How the rotary embedding reaches beyond its first context."""
    if (tensor := facts.tensor(_FACTORS)) is not None:
        return _llama3(facts, tensor, base)
    attention = facts.get(f"{_SCALING}attn_factor")
    if facts.tensor(_LONG["long_factor"]) is not None:
        facts.get(f"{_SCALING}type")
        return {
            "rope_type": "longrope", **{name: _numbers(facts, own) for name, own in _LONG.items()},
            **({"attention_factor": attention} if attention else {}),
        }  # fmt: skip
    kind, factor = facts.get(f"{_SCALING}type", "none"), facts.get(f"{_SCALING}factor")
    first = facts.get(f"{_SCALING}original_context_length")
    if attention not in (None, 0, 1):
        raise facts.bad(f"{facts.name}.{_SCALING}attn_factor is {attention!r:.80}, only 1 is read; use safetensors")
    if kind == "none" or not factor:
        return None
    if kind not in ("linear", "yarn"):
        raise facts.bad(f"{facts.name}.{_SCALING}type is {kind!r:.80}; none, linear and yarn are read")
    given = {config: facts.get(_SCALING + key) for key, config in _YARN.items()} if kind == "yarn" else {}
    return (
        {"rope_type": kind, "factor": factor}
        | {name: value for name, value in given.items() if value is not None}
        | ({"original_max_position_embeddings": first} if first else {})
    )


def _numbers(facts: Facts, name: str) -> list[float]:
    """The float32 numbers of a tensor."""
    import numpy as np

    tensor = facts.tensor(name)
    if tensor is None or tensor.kind.name != "f32":
        raise facts.bad(f"tensor {name} is missing, or of another type than f32; convert the model again")
    return np.fromfile(tensor.file, "<f4", math.prod(tensor.shape), offset=tensor.offset).astype(float).tolist()


def _llama3(facts: Facts, tensor: Tensor, base: float) -> dict[str, Any]:
    """Llama 3's settings, found by their factors: the files have nothing but the factors. They were computed in
    float32, hence the tolerance."""
    import numpy as np

    stored = np.array(_numbers(facts, _FACTORS))
    waves = 2 * math.pi * base ** (np.arange(len(stored)) / len(stored))
    for factor in (8.0, 32.0):
        low, high, first = 1.0, 4.0, 8192
        smooth = np.clip((first / waves - low) / (high - low), 0, 1)
        if np.allclose(stored, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": first,
            }  # fmt: skip
    # Those of others are taken as they are: LongRoPE divides frequencies in the same way.
    factors = stored.tolist()
    return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
