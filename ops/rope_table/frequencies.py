"""Rope: the rotary frequencies that a checkpoint's ``config.json`` describes, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphllm.config import ConfigError
from graphllm.ir import Weight
from graphllm.ops.rope_table.op import rope_table


@dataclass(frozen=True)
class Rope:
    """Arguments of `rope_table`: inv_freq has one row, or a second one for contexts longer than original_len."""

    inv_freq: tuple[tuple[float, ...], ...]
    original_len: int = 0
    ntk_factor: float = 0.0
    scale: float = 1.0
    max_len: int = 0  # positions the scaling reaches, when that is more than the config's own number

    @staticmethod
    def from_hf(hf: Mapping[str, Any], head_dim: int, layer_type: str | None = None, theta: float = 10000.0) -> Rope:
        """Read ``rope_parameters`` (flat, or one dict a layer type) or the older ``rope_scaling`` + ``rope_theta``.

        theta: the family's default base. Raises ConfigError for an unknown type or a missing number.
        """
        return from_parameters(parameters(hf, layer_type, theta), hf, head_dim)

    def weight(self) -> Weight:
        """The frequencies as a computed parameter."""
        flat = tuple(value for row in self.inv_freq for value in row)
        return Weight((len(self.inv_freq), len(self.inv_freq[0])), value=flat, dtype="float32")

    def table(self, positions_T: Tensor, context_len_T: Tensor, inv_freq_RF: Tensor) -> tuple[Tensor, Tensor]:
        """`rope_table` with these settings."""
        # A graph that reads the context's length has keys that depend on it, which the prefix cache cannot share.
        length_T = context_len_T if self.original_len else positions_T
        return rope_table(positions_T, length_T, inv_freq_RF, self.original_len, self.ntk_factor, self.scale)


def parameters(hf: Mapping[str, Any], layer_type: str | None, theta: float) -> dict[str, Any]:
    """One flat dict with rope_type, rope_theta and the type's own numbers, from any of the formats in use."""
    found = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if layer_type is not None and isinstance(found.get(layer_type), Mapping):
        found = found[layer_type]
    defaults = {"rope_theta": hf.get("rope_theta") or theta, "partial_rotary_factor": hf.get("partial_rotary_factor")}
    made = defaults | {k: v for k, v in found.items() if v is not None}
    made["rope_type"] = found.get("rope_type") or found.get("type") or "default"
    return made


def from_parameters(p: Mapping[str, Any], hf: Mapping[str, Any], head_dim: int) -> Rope:
    """The frequencies of one flat parameter dict; ``hf`` gives the lengths."""
    kind, theta = p["rope_type"], float(p["rope_theta"])
    dim = int(head_dim * (p.get("partial_rotary_factor") or 1.0))
    longest = int(hf.get("max_position_embeddings") or 0)
    name = "original_max_position_embeddings"
    original = int(hf.get(name) or p.get(name) or longest)
    # The exponents are rounded to float32 because the checkpoints were trained with float32 exponents.
    exponents = (torch.arange(0, dim, 2, dtype=torch.float32) / dim).tolist()
    plain = tuple(theta**-e for e in exponents)

    def number(name: str) -> float:
        if not isinstance(p.get(name), (int, float)):
            raise ConfigError(
                f"config.json: rope_parameters.{name} is {p.get(name)!r}, but rope type {kind!r} needs a number; add it"
            )
        return float(p[name])

    if kind == "default":
        return Rope((plain,))
    if kind == "linear":
        return Rope((tuple(f / number("factor") for f in plain),))
    if kind == "dynamic":
        factor = number("factor")
        return Rope((plain,), original_len=longest, ntk_factor=factor, max_len=int(longest * factor))
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        return Rope((tuple(_llama3(f, number("factor"), low, high, original) for f in plain),))
    if kind == "yarn":
        factor = float(p.get("factor") or longest / original)
        row = _yarn(plain, theta, dim, factor, original, p)
        return Rope((row,), scale=_yarn_scale(factor, p), max_len=int(original * factor))
    if kind in ("longrope", "su"):
        rows = []
        for name in ("short_factor", "long_factor"):
            factors = p.get(name) or ()
            if len(factors) != len(plain):
                raise ConfigError(
                    f"config.json: rope_parameters.{name} has {len(factors)} numbers, but the model rotates "
                    f"{len(plain)} pairs; give one number a pair"
                )
            rows.append(tuple(f / float(s) for f, s in zip(plain, factors, strict=True)))
        return Rope(tuple(rows), original_len=original, scale=_longrope_scale(p, longest, original))
    raise ConfigError(
        f"config.json: rope_parameters.rope_type is {kind!r}, which is not supported; "
        "use one of default, linear, dynamic, llama3, yarn, longrope"
    )


def _llama3(f: float, factor: float, low: float, high: float, original: int) -> float:
    """Long wavelengths are divided by factor, short ones kept, the others blended. Source: Llama 3.1 release."""
    turns = original * f / (2 * math.pi)
    if turns < low:
        return f / factor
    if turns > high:
        return f
    smooth = (turns - low) / (high - low)
    return (1 - smooth) * f / factor + smooth * f


def _yarn(
    plain: tuple[float, ...], theta: float, dim: int, factor: float, original: int, p: Mapping[str, Any]
) -> tuple[float, ...]:
    """Interpolate pairs that turn less than beta_slow times over the original length, keep those above beta_fast."""

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = (min(max((i - low) / width, 0.0), 1.0) for i in range(len(plain)))
    return tuple(f / factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True))


def _yarn_scale(factor: float, p: Mapping[str, Any]) -> float:
    """The attention factor: given, or 0.1 ln(factor) + 1, or the ratio of two such terms when mscale is given."""

    def term(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])
    if p.get("mscale") and p.get("mscale_all_dim"):
        return term(p["mscale"]) / term(p["mscale_all_dim"])
    return term(1.0)


def _longrope_scale(p: Mapping[str, Any], longest: int, original: int) -> float:
    """The attention factor: given, or sqrt(1 + ln(factor) / ln(original))."""
    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])
    factor = float(p.get("factor") or longest / original)
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
