"""Integers of compressed-tensors checkpoints.

packed-BITS-GROUP: signed integers, stored with 2 ** (BITS - 1) added, lowest bits first in 32-bit words along each row,
a scale for each group of a row; a group of 0 is a whole row. packed_zeros: with zero points, packed along rows in the
same way. packed_order, packed_zeros_order: with ``weight_g_idx``, the group of each inner entry. Beside them lies
``weight_shape``, which says what is known already. ints-ROWS-INNER: int8 numbers with scales, as fp8's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from graphllm.host.libraries import Libraries
from graphllm.weights.encodings import Encoding, Part, register_family
from graphllm.weights.formats.bits import unpacked
from graphllm.weights.formats.float8 import scaled
from graphllm.weights.formats.grouped import SCALES, grouped_integers, grouped_name

_WHOLE = 1 << 30  # inner entries are never sliced: weight_g_idx may name any group


def _packed(zeros: bool, order: bool, dtype: str, name: str, bits: int, group: int) -> Encoding:
    each = 32 // math.gcd(32, bits)  # integers that fill words

    def words(count: int) -> int:
        return -(-count * bits // 32)

    def groups(inner: int) -> int:
        return -(-inner // group) if group else 1

    def decode(parts: Mapping[str, Tensor], rows: int, inner: int) -> Tensor:
        numbers = unpacked(parts["values"], bits, 1, inner) - (1 << bits - 1)
        of = parts["g_idx"].long() if order else torch.arange(inner, device=numbers.device) // (group or inner)
        if zeros:
            numbers = numbers - (unpacked(parts["zeros"], bits, 0, rows) - (1 << bits - 1))[:, of]
        return numbers.float() * parts["scales"].float()[:, of]

    def repack(
        parts: Mapping[str, Tensor], rows: int, inner: int, libraries: Libraries | None = None
    ) -> Mapping[str, Tensor]:
        half = 1 << bits - 1
        zero_points = (unpacked(parts["zeros"], bits, 0, rows) - half).T if zeros else None
        return grouped_integers(
            unpacked(parts["values"], bits, 1, inner) - half, bits, group, parts["scales"].T, zero_points
        )

    parts = [
        Part("values", "int32", lambda rows, inner: (rows, words(inner)), "{stem}.weight_packed"),
        Part("scales", dtype, lambda rows, inner: (rows, groups(inner)), "{stem}.weight_scale"),
        Part("extents", "int64", lambda rows, inner: (2,), "{stem}.weight_shape"),
    ]
    if zeros:
        stored = "{stem}.weight_zero_point"
        parts.append(Part("zeros", "int32", lambda rows, inner: (words(rows), groups(inner)), stored))
    if order:
        parts.append(Part("g_idx", "int32", lambda rows, inner: (inner,), "{stem}.weight_g_idx"))
    block = (each if zeros else 1, _WHOLE if order else max(each, group))
    same = () if order else ((grouped_name(bits, dtype, group, zeros), repack),)
    return Encoding(name, tuple(parts), block, None, decode, repacked=same)


for _zeros in (False, True):
    for _order in (False, True):
        for _dtype in SCALES:
            _end = "" if _dtype == "bfloat16" else f"_{_dtype}"
            _name = "packed" + "_zeros" * _zeros + "_order" * _order + _end
            register_family(_name, partial(_packed, _zeros, _order, _dtype))
register_family("ints", lambda name, rows, inner: scaled(name, "int8", rows, inner, "{stem}.weight_scale"))
