"""Rope: the rotary frequencies that a checkpoint's ``config.json`` describes, as data."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphllm.config import ConfigError
from graphllm.config.fields import MAX_MODEL_LEN, MOST, READ, Fields, note, number, raw, section, switch, whole
from graphllm.config.fields import read as read_field
from graphllm.config.parameter import Check, is_number
from graphllm.ir import Weight
from graphllm.ops.attention.rope_table.op import rope_table

_log = logging.getLogger(__name__)
_LARGEST = 2**20  # factor by which anything is scaled
_NUMBERS = Check(
    lambda value: isinstance(value, list) and all(is_number(v) and 0 < v <= _LARGEST for v in value),
    "set it to the checkpoint's list of numbers above 0",
)


@dataclass(frozen=True)
class Rope:
    """Arguments of `rope_table`. max_len: positions the scaling reaches, when that is more than the config's number.
    long: of LongRoPE, whether these are the long frequencies.

    Where frequencies depend on the length of a context (dynamic NTK, LongRoPE), the engine's longest one decides
    for all: the keys of a sequence need one set of frequencies, which must not change while it grows.
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0
    max_len: int = 0
    long: bool = False

    @staticmethod
    def from_hf(
        hf: Mapping[str, Any],
        head_dim: int,
        layer_type: str | None = None,
        theta: float = 10000.0,
        partly: bool = False,
    ) -> Rope:
        """Read ``rope_parameters`` (flat, or one dict a layer type) or the older ``rope_scaling`` + ``rope_theta``.

        theta: the family's default base. partly: whether the family can rotate a part of each head. Raises ConfigError
        for an unknown type or a missing number.
        """
        found = parameters(hf, layer_type, theta)
        return from_parameters(found if partly else _rotated_whole(found), hf, head_dim)

    def weight(self) -> Weight:
        """The frequencies as a computed parameter."""
        return Weight((len(self.inv_freq),), value=self.inv_freq, dtype="float32")

    def table(self, positions_T: Tensor, inv_freq_F: Tensor) -> tuple[Tensor, Tensor]:
        """`rope_table` with these settings."""
        return rope_table(positions_T, inv_freq_F, self.scale)


def parameters(hf: Mapping[str, Any], layer_type: str | None, theta: float) -> dict[str, Any]:
    """One flat dict with rope_type, rope_theta and the type's own numbers, from any of the formats in use."""
    scaling, found = section(hf, "rope_scaling"), section(hf, "rope_parameters")
    found = scaling or found if layer_type is None else {**section(found, layer_type), **scaling}
    if nested := [name for name, value in found.items() if isinstance(value, Mapping)]:
        raise ConfigError(
            f"config.json: rope_parameters has {', '.join(nested)}, but all layers of this architecture have the same; "
            "give one flat object"
        )
    above = {k: hf[k] for k in ("rope_theta", "partial_rotary_factor") if raw(hf, k) is not None}
    note(hf, "rope_type", "type")
    known = {READ: hf[READ]} if READ in hf else {}
    return {"rope_theta": theta, "rope_type": found.get("type", "default"), **above, **found, **known}


def _rotated_whole(p: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a family that rotates heads whole. Raises ConfigError where transformers would fail, too."""
    name, kind = "partial_rotary_factor", p["rope_type"]
    if kind == "proportional" or raw(p, name) in (None, 1):
        return p
    if kind != "default":
        raise ConfigError(
            f"config.json: {name} is {p[name]!r:.80}, but this architecture rotates heads whole with rope_type "
            f"{kind!r:.80}; leave one of them out, or use a checkpoint that rotates whole heads"
        )
    _log.warning("config.json: %s is %.80r: without effect, this architecture rotates heads whole", name, p[name])
    return {n: v for n, v in p.items() if n != name}


def from_parameters(p: Mapping[str, Any], hf: Mapping[str, Any], head_dim: int) -> Rope:
    """The frequencies of one flat parameter dict; ``hf`` gives the lengths, also `MAX_MODEL_LEN`."""
    kind, theta = p["rope_type"], number(p, "rope_theta", gt=1, le=1e15)
    part = number(p, "partial_rotary_factor", 1.0, 1.0, gt=0, le=1)
    dim = head_dim if kind == "proportional" else int(head_dim * part)
    if dim < 2 or dim % 2:
        raise ConfigError(
            f"config.json: heads have {head_dim} numbers and {dim} are rotated, which are no pairs; correct "
            "head_dim or partial_rotary_factor"
        )
    longest = whole(hf, "max_position_embeddings", le=MOST)
    context = whole(hf, MAX_MODEL_LEN, longest, le=MOST)
    name = "original_max_position_embeddings"
    original = whole(hf if name in hf else p, name, longest, ge=2, le=MOST)
    # The exponents are rounded to float32 because the checkpoints were trained with float32 exponents.
    exponents = (torch.arange(0, dim, 2, dtype=torch.float32) / dim).tolist()
    plain = tuple(theta**-e for e in exponents)

    if kind == "default":
        return Rope(plain)
    if kind == "proportional":  # the last pairs are not turned
        turned = int(part * head_dim // 2)
        return Rope(tuple(f / _factor(p, 1.0) if i < turned else 0.0 for i, f in enumerate(plain)))
    if kind == "linear":
        return Rope(tuple(f / _factor(p) for f in plain))
    if kind == "dynamic":
        factor = _factor(p)
        growth = factor * max(context, longest) / longest - (factor - 1)
        grown = (f * growth ** (-i / max(len(plain) - 1, 1)) for i, f in enumerate(plain))
        return Rope(tuple(grown), max_len=int(longest * factor))
    if kind == "llama3":
        low = number(p, "low_freq_factor", gt=0)
        high = number(p, "high_freq_factor", gt=0)
        return Rope(tuple(_llama3(f, _factor(p), low, high, original) for f in plain))
    if kind == "yarn":
        factor = _factor(p, longest / original)
        row = _yarn(plain, theta, dim, factor, original, p)
        return Rope(row, scale=_yarn_scale(factor, p), max_len=int(original * factor))
    if kind in ("longrope", "su"):
        rows = []
        for name in ("short_factor", "long_factor"):
            factors = read_field(p, name, _NUMBERS)
            if len(factors) != len(plain):
                raise ConfigError(
                    f"config.json: {name} has {len(factors)} numbers, but the model rotates {len(plain)} pairs; "
                    "give one number a pair"
                )
            rows.append(tuple(f / s for f, s in zip(plain, factors, strict=True)))
        long = context > original
        return Rope(rows[long], scale=_longrope_scale(p, longest, original), long=long)
    raise ConfigError(
        f"config.json: rope_type is {kind!r:.80}, which is not supported; "
        "use one of default, linear, dynamic, llama3, yarn, longrope, proportional"
    )


def _factor(p: Fields, default: float | None = None) -> float:
    """By how much the scaling stretches positions."""
    return number(p, "factor", default, default, gt=0, le=_LARGEST)


def _llama3(f: float, factor: float, low: float, high: float, original: int) -> float:
    """Long wavelengths are divided by factor, short ones kept, the others blended. Source: Llama 3.1 release."""
    turns = original * f / (2 * math.pi)
    if turns < low:
        return f / factor
    if turns > high or high <= low:
        return f
    smooth = (turns - low) / (high - low)
    return (1 - smooth) * f / factor + smooth * f


def _yarn(
    plain: tuple[float, ...], theta: float, dim: int, factor: float, original: int, p: Mapping[str, Any]
) -> tuple[float, ...]:
    """Interpolate pairs that turn less than beta_slow times over the original length, keep those above beta_fast."""

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = (
        dimension(number(p, name, usual, usual, gt=0, le=_LARGEST))
        for name, usual in (("beta_fast", 32), ("beta_slow", 1))
    )
    if switch(p, "truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = (min(max((i - low) / width, 0.0), 1.0) for i in range(len(plain)))
    return tuple(f / factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True))


def _yarn_scale(factor: float, p: Mapping[str, Any]) -> float:
    """The attention factor: given, or 0.1 ln(factor) + 1, or the ratio of two such terms when mscale is given."""

    if raw(p, "attention_factor") is not None:
        return number(p, "attention_factor", gt=0, le=_LARGEST)
    own, all_dim = (number(p, name, 0.0, 0.0, ge=0, le=_LARGEST) for name in ("mscale", "mscale_all_dim"))
    return _mscale(factor, own) / _mscale(factor, all_dim) if own and all_dim else _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def softmax_factor(hf: Mapping[str, Any]) -> float:
    """The further factor of q.k in DeepSeek's families, 1 for positions that are not stretched: the square of YaRN's
    mscale_all_dim, of which `Rope.scale` has the rest. Raises ConfigError for a missing number."""
    p = parameters(hf, None, 10000.0)
    all_dim = number(p, "mscale_all_dim", 0.0, 0.0, ge=0, le=_LARGEST)
    return _mscale(_factor(p), all_dim) ** 2 if all_dim and p["rope_type"] != "default" else 1.0


def _longrope_scale(p: Mapping[str, Any], longest: int, original: int) -> float:
    """The attention factor: given, or sqrt(1 + ln(factor) / ln(original))."""
    if raw(p, "attention_factor") is not None:
        return number(p, "attention_factor", gt=0, le=_LARGEST)
    factor = _factor(p, longest / original)
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
