"""What matrices are rounded to, and how compressed-tensors stores it: the schemes by name.

A number is (level - zero) * scale: levels are integers, or floats of 8 or 4 bits; a row has one scale, and perhaps one
zero, for each group of its inner entries.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from graphllm.config import ConfigError

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)
_CHUNK = 1 << 24  # numbers that a search for scales looks at together


@dataclass(frozen=True)
class Scheme:
    """format: compressed-tensors' name for the layout.
    group: inner entries with one scale, 0 for a row.
    activations: what an engine may round activations to, as compressed-tensors says it.
    """

    format: str
    kind: str
    bits: int
    group: int = 0
    zeros: bool = False
    activations: bool = False

    @property
    def lowest(self) -> int:
        return -(1 << self.bits - 1)

    @property
    def highest(self) -> int:
        return (1 << self.bits - 1) - 1

    def levels(self, scaled: Tensor) -> Tensor:
        """The nearest level of each number, as float32."""
        if self.kind == "int":
            return scaled.round().clamp(self.lowest, self.highest)
        if self.bits == 8:
            return scaled.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        return torch.tensor(_E2M1, device=scaled.device)[_e2m1_codes(scaled)].copysign(scaled)


@dataclass(frozen=True)
class Grid:
    """Scales [O, G] and zeros [O, G], float32 numbers that their stored form has exactly, for groups of ``group`` inner
    entries."""

    scheme: Scheme
    group: int
    scales: Tensor
    zeros: Tensor

    def columns(self, scale: Tensor, zero: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Levels of numbers under these scales and zeros, and the numbers that they stand for."""
        levels = self.scheme.levels(torch.where(scale == 0, 0, numbers / scale) + zero)
        return levels, (levels - zero) * scale

    def rounded(self, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
        """`columns` of a whole matrix."""
        parts = weight_OI.unflatten(1, (-1, self.group))
        levels, numbers = self.columns(self.scales.unsqueeze(-1), self.zeros.unsqueeze(-1), parts)
        return levels.flatten(1), numbers.flatten(1)


def grid_of(weight_OI: Tensor, scheme: Scheme, dtype: torch.dtype, importance_I: Tensor | None = None) -> Grid:
    """The scales with the least squared error of the numbers, each weighted by its importance. dtype: what scales are
    stored in, if the scheme leaves it open."""
    group = scheme.group or weight_OI.shape[1]
    importance = torch.ones_like(weight_OI[0]) if importance_I is None else importance_I
    step = max(1, _CHUNK // weight_OI.shape[1])
    found = [_grid_of(rows, scheme, dtype, importance, group) for rows in weight_OI.split(step)]
    return Grid(scheme, group, torch.cat([g.scales for g in found]), torch.cat([g.zeros for g in found]))


def _grid_of(weight_OI: Tensor, scheme: Scheme, dtype: torch.dtype, importance_I: Tensor, group: int) -> Grid:
    parts, importance = weight_OI.unflatten(1, (-1, group)), importance_I.unflatten(0, (-1, group))
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    best: Grid | None = None
    least = low
    for shrink in _candidates(scheme):
        scales, zeros = _scales(low * shrink, high * shrink, scheme, dtype)
        grid = Grid(scheme, group, scales, zeros)
        _, numbers = grid.columns(scales.unsqueeze(-1), zeros.unsqueeze(-1), parts)
        error = ((numbers - parts).square() * importance).sum(-1)
        if best is None:
            best, least = grid, error
            continue
        better = error < least
        best = Grid(scheme, group, torch.where(better, scales, best.scales), torch.where(better, zeros, best.zeros))
        least = torch.where(better, error, least)
    assert best is not None
    return best


def _candidates(scheme: Scheme) -> tuple[float, ...]:
    """By how much the range of a group is made smaller: what lies outside is clamped, the rest is finer."""
    if scheme.kind == "int":
        return _SHRINKS
    return (1.0,) if scheme.bits == 8 else (1.0, 2.0)  # of four-bit floats, scales are powers of two


def _scales(low: Tensor, high: Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales and zeros for groups of numbers between these."""
    largest, none = torch.maximum(-low, high), torch.zeros_like(low)
    if scheme.kind == "float" and scheme.bits == 8:
        return (largest / 448).to(dtype).float(), none
    if scheme.kind == "float":
        # frexp: a mantissa from 0.5 on; the largest level is 1.5 * 2 ** 2.
        return torch.exp2((torch.frexp(largest).exponent - 3).clamp(-127, 127).float()), none
    if not scheme.zeros:
        return (largest / (scheme.highest + 0.5)).to(dtype).float(), none
    scales = ((high - low) / (scheme.highest - scheme.lowest)).to(dtype).float()
    zeros = scheme.lowest - torch.where(scales == 0, 0, low / scales).round()
    return scales, zeros.clamp(scheme.lowest, scheme.highest)


def _e2m1_codes(scaled: Tensor) -> Tensor:
    """The three bits of the nearest magnitude; ties go to the even code."""
    edges = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(_E2M1)], device=scaled.device)
    size = scaled.abs()
    return torch.bucketize(size, edges) + sum((size == edge).long() for edge in edges[1::2])


# --- what is stored


def stored(grid: Grid, levels_OI: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a matrix, by the last part of their names. dtype: of scales that the scheme leaves open."""
    scheme, scales = grid.scheme, grid.scales.to(dtype)
    if scheme.format == "float-quantized":
        return {"weight": levels_OI.to(torch.float8_e4m3fn), "weight_scale": scales}
    if scheme.format == "int-quantized":
        return {"weight": levels_OI.to(torch.int8), "weight_scale": scales}
    if scheme.kind == "float":
        codes = (_e2m1_codes(levels_OI) + 8 * torch.signbit(levels_OI)).to(torch.uint8)
        exponents = torch.frexp(grid.scales).exponent - 1
        return {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": (exponents + 127).to(torch.uint8)}
    made = {
        "weight_packed": packed(levels_OI - scheme.lowest, scheme.bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(levels_OI.shape, dtype=torch.int64),
    }
    if scheme.zeros:
        made["weight_zero_point"] = packed((grid.zeros - scheme.lowest).T, scheme.bits).T.contiguous()
    return made


def packed(numbers: Tensor, bits: int) -> Tensor:
    """Rows of unsigned integers as a stream of bits in 32-bit words, the lowest bits first."""
    places = torch.arange(bits, dtype=torch.uint8, device=numbers.device)
    stream = ((numbers.to(torch.uint8).unsqueeze(-1) >> places) & 1).flatten(1)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[1] % 32)).unflatten(1, (-1, 8))
    return (
        (stream << torch.arange(8, dtype=torch.uint8, device=numbers.device)).sum(-1).to(torch.uint8).view(torch.int32)
    )


def quantization_config(scheme: Scheme, ignore: list[str]) -> dict[str, Any]:
    """What config.json says of it."""
    weights: dict[str, Any] = {
        "num_bits": scheme.bits, "type": scheme.kind, "symmetric": not scheme.zeros, "dynamic": False,
        "strategy": "group" if scheme.group else "channel",
    }  # fmt: skip
    if scheme.group:
        weights["group_size"] = scheme.group
    if scheme.format == "mxfp4-pack-quantized":
        weights["scale_dtype"] = "torch.uint8"
    inputs = {"num_bits": 8, "type": scheme.kind, "symmetric": True, "dynamic": True, "strategy": "token"}
    group = {
        "targets": ["Linear"], "weights": weights, "input_activations": inputs if scheme.activations else None,
        "output_activations": None, "format": scheme.format,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": scheme.format, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ignore, "kv_cache_scheme": None,
    }  # fmt: skip


SCHEMES = {
    "fp8": Scheme("float-quantized", "float", 8, activations=True),
    "int8": Scheme("pack-quantized", "int", 8),
    "w8a8": Scheme("int-quantized", "int", 8, activations=True),
    "int4": Scheme("pack-quantized", "int", 4, 128),
    "int4-zeros": Scheme("pack-quantized", "int", 4, 128, zeros=True),
    "int3": Scheme("pack-quantized", "int", 3, 128),
    "int2": Scheme("pack-quantized", "int", 2, 128),
    "mxfp4": Scheme("mxfp4-pack-quantized", "float", 4, 32),
}


def scheme_of(name: str, group: int | None) -> Scheme:
    """The scheme of that name, with groups of another size if one is given. Raises ConfigError where there is none."""
    if name not in SCHEMES:
        raise ConfigError(f"scheme is {name!r:.80}: use {', '.join(SCHEMES)}")
    scheme = SCHEMES[name]
    if group is None:
        return scheme
    if scheme.format != "pack-quantized":
        raise ConfigError(f"group_size is {group}: scheme {name} has groups of {scheme.group or 'a row'}; leave it out")
    if group < 1:
        raise ConfigError(f"group_size is {group}: give a whole number from 1, such as 32 or 128")
    return replace(scheme, group=group)
