"""The block types of GGUF files, as ggml defines them: rows of blocks of 32 or 256 inner entries, kept as their bytes.

gguf_q4_k and the like are the types by their names in the format; "gguf_q4_k-128" is the same for a matrix whose rows
are interleaved, in heads of 128: the first and the second half of a head take turns, which is how files of the
architecture llama store queries and keys. Decoding puts the rows back, as the model's rotary embedding wants them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from graphllm.weights.encodings import Encoding, Part, register_family
from graphllm.weights.formats.grouped import grouped_integers, grouped_name
from graphllm.weights.gguf import TYPES, Blocks

# The sixteen values of IQ4_NL and IQ4_XS (ggml's kvalues_iq4nl).
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _cut(blocks: Tensor, *widths: int) -> tuple[Tensor, ...]:
    return blocks.split(widths, 1)


def _half(two: Tensor) -> Tensor:
    return two.contiguous().view(torch.float16).float()


def _halves(codes: Tensor) -> Tensor:
    """The low four bits of all bytes of the last dimension, then the high ones."""
    return torch.cat([codes & 15, codes >> 4], -1)


def _quarters(codes: Tensor) -> Tensor:
    """The lowest two bits of all bytes of the last dimension, then the next two, and so on."""
    return torch.cat([codes >> shift & 3 for shift in (0, 2, 4, 6)], -1)


def _bits(data: Tensor) -> Tensor:
    """[n, bytes] as [n, 8, bytes]: the lowest bits of all bytes, then the next ones."""
    return torch.stack([data >> shift & 1 for shift in range(8)], 1)


def _fifth(data: Tensor) -> Tensor:
    """The fifth bits of 32 entries out of four bytes, the lowest one first, as 0 or 16."""
    return torch.stack([data >> shift & 1 for shift in range(8)], -1).flatten(1) << 4


def _float(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    return blocks.contiguous().view(dtype).float()


def _q8_0(blocks: Tensor) -> Tensor:
    d, codes = _cut(blocks, 2, 32)
    return _half(d) * codes.view(torch.int8)


def _q4_0(blocks: Tensor) -> Tensor:
    d, codes = _cut(blocks, 2, 16)
    return _half(d) * (_halves(codes).to(torch.int8) - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    d, m, codes = _cut(blocks, 2, 2, 16)
    return _half(d) * _halves(codes) + _half(m)


def _q5_0(blocks: Tensor) -> Tensor:
    d, high, codes = _cut(blocks, 2, 4, 16)
    return _half(d) * ((_halves(codes) | _fifth(high)).to(torch.int8) - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    d, m, high, codes = _cut(blocks, 2, 2, 4, 16)
    return _half(d) * (_halves(codes) | _fifth(high)) + _half(m)


def _q2_k(blocks: Tensor) -> Tensor:
    scales, codes, d, m = _cut(blocks, 16, 64, 2, 2)
    of = _quarters(codes.unflatten(1, (2, 32))).flatten(1).unflatten(1, (16, 16))
    scale, low = (_half(d) * (scales & 15)).unsqueeze(-1), (_half(m) * (scales >> 4)).unsqueeze(-1)
    return (scale * of - low).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    high, codes, packed, d = _cut(blocks, 32, 64, 12, 2)
    low, top = packed.split((8, 4), 1)
    six = _halves(low) | torch.cat([top >> shift & 3 for shift in (0, 2, 4, 6)], -1) << 4
    twos = _quarters(codes.unflatten(1, (2, 32))).flatten(1).to(torch.int8)
    numbers = twos - (4 - 4 * _bits(high).flatten(1).to(torch.int8))
    scale = _half(d) * (six.to(torch.int8) - 32)
    return (scale.unsqueeze(-1) * numbers.unflatten(1, (16, 16))).flatten(1)


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of six bits out of twelve bytes."""
    a, b, c = packed.split(4, 1)
    return torch.cat([a & 63, c & 15 | a >> 6 << 4], 1), torch.cat([b & 63, c >> 4 | b >> 6 << 4], 1)


def _scaled(d: Tensor, m: Tensor, packed: Tensor, codes: Tensor) -> Tensor:
    scales, lows = _k_scales(packed)
    return ((_half(d) * scales).unsqueeze(-1) * codes - (_half(m) * lows).unsqueeze(-1)).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    d, m, packed, codes = _cut(blocks, 2, 2, 12, 128)
    return _scaled(d, m, packed, _halves(codes.unflatten(1, (4, 32))).flatten(1).unflatten(1, (8, 32)))


def _q5_k(blocks: Tensor) -> Tensor:
    d, m, packed, high, codes = _cut(blocks, 2, 2, 12, 32, 128)
    fours = _halves(codes.unflatten(1, (4, 32))).flatten(1).unflatten(1, (8, 32))
    return _scaled(d, m, packed, fours | _bits(high) << 4)


def _q6_k(blocks: Tensor) -> Tensor:
    low, high, scales, d = _cut(blocks, 128, 64, 16, 2)
    fours = _halves(low.unflatten(1, (2, 64))).flatten(1)
    six = fours | _quarters(high.unflatten(1, (2, 32))).flatten(1) << 4
    scale = _half(d) * scales.view(torch.int8)
    return (scale.unsqueeze(-1) * (six.to(torch.int8) - 32).unflatten(1, (16, 16))).flatten(1)


def _iq4(codes: Tensor) -> Tensor:
    return torch.tensor(_IQ4, dtype=torch.float32, device=codes.device)[_halves(codes).int()]


def _iq4_nl(blocks: Tensor) -> Tensor:
    d, codes = _cut(blocks, 2, 16)
    return _half(d) * _iq4(codes)


def _iq4_xs(blocks: Tensor) -> Tensor:
    d, high, low, codes = _cut(blocks, 2, 2, 4, 128)
    fours = torch.stack([low & 15, low >> 4], -1).flatten(1)
    twos = torch.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(1)
    scale = _half(d) * ((fours | twos << 4).to(torch.int8) - 32)
    return (scale.unsqueeze(-1) * _iq4(codes.unflatten(1, (8, 16)))).flatten(1)


# From blocks [n, bytes] to float32 [n, entries].
_NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "f32": partial(_float, dtype=torch.float32), "f16": _half, "bf16": partial(_float, dtype=torch.bfloat16),
    "q8_0": _q8_0, "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q2_k": _q2_k, "q3_k": _q3_k,
    "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k, "iq4_nl": _iq4_nl, "iq4_xs": _iq4_xs,
}  # fmt: skip


def _encoding(kind: Blocks, name: str, head: int = 1) -> Encoding:
    """head: rows that are interleaved, 1 for rows in their order."""

    def decode(parts: Mapping[str, Tensor], rows: int, inner: int) -> Tensor:
        return in_order(_NUMBERS[kind.name](parts["blocks"].reshape(-1, kind.nbytes)).reshape(rows, inner))

    def in_order(stored: Tensor) -> Tensor:
        return stored if head == 1 else stored.unflatten(0, (-1, head // 2, 2)).transpose(1, 2).flatten(0, 2)

    def repack(parts: Mapping[str, Tensor], rows: int, inner: int) -> Mapping[str, Tensor]:
        d, codes = _cut(parts["blocks"].reshape(-1, kind.nbytes), 2, 16)
        numbers, scales = _halves(codes).to(torch.int8) - 8, d.contiguous().view(torch.float16)
        numbers, scales = (in_order(each.reshape(rows, -1)) for each in (numbers, scales))
        return grouped_integers(numbers, 4, kind.entries, scales.T)

    def blocks(rows: int, inner: int) -> tuple[int, int]:
        return rows, inner // kind.entries * kind.nbytes

    same = ((grouped_name(4, "float16", kind.entries, zeros=False), repack),) if kind.name == "q4_0" else ()
    return Encoding(name, (Part("blocks", "uint8", blocks),), (head, kind.entries), None, decode, repacked=same)


for _type in TYPES.values():
    register_family(f"gguf_{_type.name}", partial(_encoding, _type))
