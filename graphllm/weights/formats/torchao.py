"""TorchAO checkpoints in safetensors: a tensor's data, scales and zero points under names of their own.

ao_ints-ROWS-INNER: int8 numbers with a scale for each block, as fp8's; ao_ints_zeros: less a zero point before.
ao_fp8-ROWS-INNER: E4M3. ao_int4-GROUP: signed integers of four bits, the lower one of a byte first, times a scale, plus
a float, both stored [groups, rows].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from graphllm.host.libraries import Libraries
from graphllm.weights.encodings import Encoding, Part, register_family
from graphllm.weights.formats.bits import nibbles
from graphllm.weights.formats.float8 import scaled
from graphllm.weights.formats.grouped import grouped_integers, grouped_name

_DATA, _SCALE, _ZERO = (f"{{stem}}._weight_{name}" for name in ("qdata", "scale", "zero_point"))


def _zeros(name: str, rows: int, inner: int) -> Encoding:
    plain = scaled(name, "int8", rows, inner, _SCALE, values=_DATA)
    zeros = Part("zeros", "int8", plain.part("scales").shape, _ZERO)

    def decode(parts: Mapping[str, Tensor], r: int, i: int) -> Tensor:
        # The scales, spread, are what ones stand for.
        ones = torch.ones_like(parts["values"])
        spread = plain.decode({"values": ones, "scales": parts["zeros"]}, r, i)
        return (parts["values"] - spread) * plain.decode({"values": ones, "scales": parts["scales"]}, r, i)

    def repack(parts: Mapping[str, Tensor], r: int, i: int, libraries: Libraries | None = None) -> Mapping[str, Tensor]:
        return grouped_integers(parts["values"].int(), 8, inner, parts["scales"].float().T, parts["zeros"].T)

    same = ((grouped_name(8, "float32", inner, zeros=True), repack),) if rows == 1 else ()
    return Encoding(name, (*plain.parts, zeros), plain.block, None, decode, repacked=same)


def _int4(name: str, group: int) -> Encoding:
    def groups(rows: int, inner: int) -> tuple[int, int]:
        return -(-inner // group), rows

    def decode(parts: Mapping[str, Tensor], rows: int, inner: int) -> Tensor:
        codes = nibbles(parts["values"].view(torch.uint8)).to(torch.int16)
        signed = torch.where(codes > 7, codes - 16, codes).float()
        scales, more = (parts[n].float().T.repeat_interleave(group, 1)[:, :inner] for n in ("scales", "more"))
        return signed * scales + more

    parts = (
        Part("values", "int8", lambda rows, inner: (rows, inner // 2), _DATA),
        Part("scales", "bfloat16", groups, _SCALE),
        Part("more", "bfloat16", groups, _ZERO),
    )
    return Encoding(name, parts, (1, group), None, decode)


register_family("ao_ints", lambda name, rows, inner: scaled(name, "int8", rows, inner, _SCALE, values=_DATA))
register_family("ao_ints_zeros", _zeros)
register_family("ao_fp8", lambda name, rows, inner: scaled(name, "float8_e4m3fn", rows, inner, _SCALE, values=_DATA))
register_family("ao_int4", _int4)
