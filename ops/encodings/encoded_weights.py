"""Encoded weights as the ops of linear layers and experts take them: what every bit of them means.

A weight [O, I] is a matrix of small numbers, times a scale for each group of inner entries of a row. The codes of the
numbers, of eight or four bits, are packed into int16. I is cut into spans (see `span_of`, the last one padded). With n
codes in an int16, entry i = span * p + (span / n) * j + c of a row is the j-th of its int16 number (span / n) * p + c,
the lowest bits first. So neighbouring entries are the same bits of neighbouring numbers, which is how kernels decode
two at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from graphllm.ir.testing import Maker

BITS = {"float8": 8, "int8": 8, "int4": 4, "e2m1": 4}
"""Of a code, by form."""


def span_of(form: str, inner: int, group: int) -> int:
    """Inner entries with codes in the same int16 numbers, for groups of ``group`` (0: a row). The j-th codes of a span
    are of one group."""
    fits = BITS[form] == 4 and group % 64 == 0 and -inner % 256 <= max(-inner % 128, inner // 32)
    return 256 if fits else 128


def width_of(form: str, inner: int, group: int) -> int:
    """int16 numbers of a row."""
    span = span_of(form, inner, group)
    return -(-inner // span) * span * BITS[form] // 16


def packed(codes_OI: Tensor, form: str, group: int) -> Tensor:
    """The codes [O, I], unsigned, as int16 [O, W], of a weight with groups of ``group`` inner entries."""
    bits, inner = BITS[form], codes_OI.shape[1]
    span = span_of(form, inner, group)
    codes = torch.nn.functional.pad(codes_OI.to(torch.int32), (0, -inner % span))
    shifts = torch.arange(0, 16, bits, dtype=torch.int32, device=codes.device)
    words = (codes.unflatten(1, (-1, 16 // bits, span * bits // 16)) << shifts.unsqueeze(1)).sum(2, dtype=torch.int32)
    return torch.where(words >= 1 << 15, words - (1 << 16), words).to(torch.int16).flatten(1)


def codes_of(packed_OW: Tensor, form: str, group: int, inner: int) -> Tensor:
    """The codes [O, I], unsigned, as int32: what `packed` packs."""
    bits, span = BITS[form], span_of(form, inner, group)
    shifts = torch.arange(0, 16, bits, dtype=torch.int32, device=packed_OW.device)
    words = packed_OW.to(torch.int32).unflatten(1, (-1, 1, span * bits // 16))
    return ((words >> shifts.unsqueeze(1)) & ((1 << bits) - 1)).flatten(1)[:, :inner]


def decoded(weight_OW: Tensor, scales_GO: Tensor, zeros_GO: Tensor | None, form: str, group: int, inner: int) -> Tensor:
    """The exact weight [O, I], in float32 (float64 for float64 scales). The numbers of a form:

    - "float8": E4M3, without infinities. "int8": signed, two's complement.
    - "int4": 0 to 15, less 8. "e2m1": a sign, two bits of exponent, one of mantissa.

    scales_GO [G, O]: one for each ``group`` of inner entries, 0 for all of them; powers of two, 127 added to the
    exponent, where they are uint8. zeros_GO [G, O] int16: are subtracted from the numbers, before they are scaled.
    """
    if scales_GO.dtype == torch.uint8:
        scales_GO = (scales_GO.float() - 127).exp2()
    wide = torch.promote_types(scales_GO.dtype, torch.float32)
    codes = codes_of(weight_OW, form, group, inner)
    if form == "float8":
        numbers = codes.to(torch.uint8).view(torch.float8_e4m3fn).to(wide)
    elif form == "int8":
        numbers = torch.where(codes >= 128, codes - 256, codes).to(wide)
    else:
        numbers = (codes - 8).to(wide) if form == "int4" else _e2m1(codes).to(wide)
    if zeros_GO is not None:
        numbers = numbers - _spread(zeros_GO.to(wide), group, inner)
    return numbers * _spread(scales_GO.to(wide), group, inner)


def _e2m1(codes: Tensor) -> Tensor:
    """float32 numbers of four-bit floats (OCP Microscaling Formats 1.0, section 5.3.3)."""
    exponents, halves = (codes >> 1) & 3, (codes & 1) * 0.5
    magnitudes = torch.where(exponents == 0, halves, (1 + halves) * (exponents - 1).float().exp2())
    return torch.where(codes >= 8, -magnitudes, magnitudes)


def _spread(values_GO: Tensor, group: int, inner: int) -> Tensor:
    """[O, I]: the value of each entry's group."""
    return values_GO.T.repeat_interleave(group or inner, 1)[:, :inner]


def encoded(make: Maker, encoding: str, out: int, inner: int) -> dict[str, object]:
    """Arguments of a case: a random encoded weight [out, inner]. encoding: the form, with or without -zeros, and the
    group, such as int4-zeros-128."""
    form, *more = encoding.split("-")
    group = int(more[-1])
    shape = (-(-inner // group) if group else 1, out)
    if form == "float8":
        codes = make.normal(out, inner, scale=64.0, dtype=torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = make.integers(0, 1 << BITS[form], out, inner)
    size = {"float8": 64, "int8": 73, "int4": 4.6, "e2m1": 3}[form] * inner**0.5
    if form == "e2m1":
        scales = make.integers(120, 124, *shape, dtype=torch.uint8)
    else:
        dtype = torch.float32 if form == "float8" else torch.float16
        scales = (make.normal(*shape, dtype=torch.float32).abs() / size + 0.5 / size).to(dtype)
    zeros = make.integers(-3, 4, *shape, dtype=torch.int16) if "zeros" in more else None
    weight = packed(codes, form, group)
    return {"weight_OI": weight, "scales_GO": scales, "zeros_GO": zeros, "form": form, "group": group}
