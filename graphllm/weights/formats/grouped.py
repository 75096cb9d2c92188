"""What the kernels for linear layers and experts on a GPU read: numbers of eight or four bits, with a scale and perhaps
a zero point for each group of inner entries of a row. `graphllm.ops.encodings.encoded_weights` says what every bit
means.

FAMILY-GROUP, a group of 0 is a whole row. float8: E4M3, float32 scales. byte_T: int8, nibble_T: integers of four bits;
byte_zeros_T and nibble_zeros_T: with zero points. T: the dtype of the scales. e2m1: four-bit floats, the scales powers
of two. Checkpoints are repacked to these without rounding. Plain numbers are rounded to them: the largest of a group
becomes the largest that there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from graphllm.ops.encodings.encoded_weights import decoded, packed, width_of
from graphllm.weights.encodings import Encoding, Part, register_family

Parts = Mapping[str, Tensor]
SCALES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
_SPAN = 256  # entries; see `span_of`
_OP = ("weight_OI", "scales_GO", "zeros_GO")
_GATE_UP = ("gate_up_N2FD", "gate_up_scales_NG2F", "gate_up_zeros_NG2F")
_DOWN = ("down_NDF", "down_scales_NGD", "down_zeros_NGD")


def _grouped(
    name: str, form: str, scales: str, group: int, zeros: bool, encode: Callable[[Tensor], Parts] | None
) -> Encoding:
    """scales: their dtype."""

    def stored(rows: int, inner: int) -> tuple[int, int]:
        return rows, width_of(form, inner, group)

    def groups(rows: int, inner: int) -> tuple[int, int]:
        return -(-inner // group) if group else 1, rows

    def decode(parts: Parts, rows: int, inner: int) -> Tensor:
        return decoded(parts["values"], parts["scales"], parts.get("zeros"), form, group, inner)

    parts = [Part("values", "int16", stored), Part("scales", scales, groups, "{source}_scale")]
    if zeros:
        parts.append(Part("zeros", "int16", groups, "{source}_zero"))
    inner = math.lcm(_SPAN, group or 1)
    return Encoding(
        name, tuple(parts), (1, inner), "linear", decode, encode, arguments=_OP[: len(parts)],
        moe_op="fused_moe", moe_arguments=(_GATE_UP[: len(parts)], _DOWN[: len(parts)]),
        settings={"form": form, "group": group}, devices=("cuda",),
    )  # fmt: skip


def _groups_of(numbers: Tensor, group: int) -> Tensor:
    """[O, G, group] float32, the last group padded with zeros."""
    width = group or numbers.shape[1]
    return torch.nn.functional.pad(numbers.float(), (0, -numbers.shape[1] % width)).unflatten(1, (-1, width))


def _encode_float8(group: int, numbers: Tensor) -> Parts:
    grouped = _groups_of(numbers, group)
    scales = (grouped.abs().amax(-1) / 448).clamp(min=torch.finfo(torch.float32).tiny)
    values = (grouped / scales.unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    codes = values.view(torch.uint8).flatten(1)[:, : numbers.shape[1]]
    return {"values": packed(codes, "float8", group), "scales": scales.T.contiguous()}


def _encode_byte(group: int, dtype: str, zeros: bool, numbers: Tensor) -> Parts:
    grouped = _groups_of(numbers, group)
    scales = (grouped.abs().amax(-1) / 127).to(getattr(torch, dtype))
    values = (grouped / torch.where(scales == 0, 1, scales.float()).unsqueeze(-1)).round().clamp(-127, 127)
    codes = values.to(torch.int8).view(torch.uint8).flatten(1)[:, : numbers.shape[1]]
    made = {"values": packed(codes, "int8", group), "scales": scales.T.contiguous()}
    return {**made, "zeros": torch.zeros_like(made["scales"], dtype=torch.int16)} if zeros else made


def _encode_nibble(group: int, dtype: str, zeros: bool, numbers: Tensor) -> Parts:
    """The largest of a group becomes -8, with a scale of the opposite sign, so that all sixteen integers are used."""
    grouped = _groups_of(numbers, group)
    high, low = grouped.amax(-1), grouped.neg().amax(-1)
    scales = (torch.where(low > high, low, -high) / 8 + 0.0).to(getattr(torch, dtype))
    codes = (grouped / torch.where(scales == 0, 1, scales.float()).unsqueeze(-1)).round().clamp(-8, 7) + 8
    made = {"values": packed(codes.flatten(1)[:, : numbers.shape[1]], "int4", group), "scales": scales.T.contiguous()}
    return {**made, "zeros": torch.zeros_like(made["scales"], dtype=torch.int16)} if zeros else made


def _encode_e2m1(group: int, numbers: Tensor) -> Parts:
    """As OCP Microscaling Formats 1.0, section 6.3: the largest power of two in a group gets the largest exponent."""
    grouped = _groups_of(numbers, group)
    exponents = (torch.frexp(grouped.abs().amax(-1)).exponent - 3).clamp(-127, 127)  # frexp: half the usual mantissa
    scaled = grouped / torch.exp2(exponents.float()).unsqueeze(-1)
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=numbers.device)
    magnitude = torch.bucketize(scaled.abs(), edges)
    # A tie goes to the even code.
    magnitude += (scaled.abs().unsqueeze(-1) == edges[1::2]).any(-1)
    codes = magnitude + 8 * (scaled < 0)
    scales = (exponents + 127).to(torch.uint8)
    return {"values": packed(codes.flatten(1)[:, : numbers.shape[1]], "e2m1", group), "scales": scales.T.contiguous()}


register_family(
    "float8", lambda name, group: _grouped(name, "float8", "float32", group, False,
                                           partial(_encode_float8, group))
)  # fmt: skip
register_family("e2m1", lambda name, group: _grouped(name, "e2m1", "uint8", group, False, partial(_encode_e2m1, group)))
for _dtype, _tag in SCALES.items():
    for _zeros in (False, True):
        register_family(
            f"byte{'_zeros' * _zeros}_{_tag}",
            lambda name, group, dtype=_dtype, zeros=_zeros: _grouped(
                name, "int8", dtype, group, zeros, partial(_encode_byte, group, dtype, zeros)
            ),
        )
        register_family(
            f"nibble{'_zeros' * _zeros}_{_tag}",
            lambda name, group, dtype=_dtype, zeros=_zeros: _grouped(
                name, "int4", dtype, group, zeros, partial(_encode_nibble, group, dtype, zeros)
            ),
        )


def grouped_integers(
    numbers_OI: Tensor, bits: int, group: int, scales_GO: Tensor, zeros_GO: Tensor | None = None
) -> Parts:
    """The parts of byte or nibble encodings. numbers_OI: signed integers of ``bits`` bits; zeros_GO: what is subtracted
    from them."""
    codes, form = (numbers_OI + 8, "int4") if bits <= 4 else (numbers_OI & 255, "int8")
    made = {"values": packed(codes, form, group), "scales": scales_GO.contiguous()}
    return made if zeros_GO is None else {**made, "zeros": zeros_GO.to(torch.int16).contiguous()}


def grouped_name(bits: int, dtype: str, group: int, zeros: bool) -> str:
    """The encoding of integers of ``bits`` bits. dtype: of the scales."""
    return f"{'nibble' if bits <= 4 else 'byte'}{'_zeros' * zeros}_{SCALES[dtype]}-{group}"
