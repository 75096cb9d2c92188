"""The block types of GGUF files as ggml defines them: the numbers of their blocks, and blocks of 16 rows interleaved.

A block is 32 or 256 inner entries of a row. A *tile* is the blocks of 16 rows side by side, as kernels read them: field
by field, each field cut into units, with the units of the 16 rows in turn. So a tile has exactly the bytes of its
blocks, and 64 of them are the same four codes, or pairs of codes, of 16 rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from graphllm.ops.encodings.gguf_tiles import ROWS, TILED


def tiles(blocks_RN: Tensor, kind: str) -> Tensor:
    """Rows of whole blocks, uint8 [R, blocks of a row * bytes], as tiles, uint8 [ceil(R / 16), blocks of a row, 16 *
    bytes]. Rows that pad the last tile are zeros."""
    form = TILED[kind]
    rows = torch.nn.functional.pad(blocks_RN, (0, 0, 0, -blocks_RN.shape[0] % ROWS))
    blocks = rows.unflatten(1, (-1, form.nbytes)).unflatten(0, (-1, ROWS)).transpose(1, 2)  # tile, block, row, byte
    out = blocks.new_empty((*blocks.shape[:2], ROWS * form.nbytes))
    at = 0
    for field in form.fields:
        part = blocks[..., at : at + field.nbytes]
        part = _bits_in_tile(part) if field.bits else part
        units = _as_units(part, field.unit).transpose(2, 3)
        _as_units(out[..., ROWS * at : ROWS * (at + field.nbytes)], field.unit).copy_(units.flatten(2))
        at += field.nbytes
    return out


def untiled(tiles_BGN: Tensor, kind: str) -> Tensor:
    """The rows of whole blocks, uint8 [16 * B, blocks of a row * bytes], that `tiles` makes tiles of."""
    form, parts, at = TILED[kind], [], 0
    for field in form.fields:
        part = tiles_BGN[..., ROWS * at : ROWS * (at + field.nbytes)]
        part = part.unflatten(2, (-1, ROWS, field.unit)).transpose(2, 3).flatten(3)
        parts.append(_bits_in_block(part) if field.bits else part)
        at += field.nbytes
    return torch.cat(parts, 3).transpose(1, 2).flatten(2).flatten(0, 1)


def dequantize(tiles_BGN: Tensor, kind: str, rows: int) -> Tensor:
    """The first ``rows`` rows of the matrix that tiles stand for, exactly as ggml computes them, in float32."""
    blocks = untiled(tiles_BGN, kind)[:rows]
    numbers = NUMBERS[kind](blocks.reshape(-1, TILED[kind].nbytes))
    return numbers.reshape(rows, tiles_BGN.shape[1] * TILED[kind].entries)


def _as_units(part: Tensor, unit: int) -> Tensor:
    """The last dimension as whole numbers of ``unit`` bytes, if it is not single bytes."""
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[unit]
    if part.storage_offset() % unit or any(s % unit for s in part.stride()[:-1]):
        part = part.contiguous()
    return part.view(dtype)


def _bits_in_tile(part: Tensor) -> Tensor:
    """Four bytes of 32 bits in the order of the entries, as a tile has them."""
    entries = torch.stack([part >> shift & 1 for shift in range(8)], -1).flatten(-2).unflatten(-1, (8, 4))
    return _joined(entries.transpose(-1, -2))


def _bits_in_block(part: Tensor) -> Tensor:
    """What `_bits_in_tile` takes."""
    entries = torch.stack([part >> shift & 1 for shift in range(8)], -2).flatten(-2).unflatten(-1, (4, 8))
    return _joined(entries)


def _joined(bits: Tensor) -> Tensor:
    """Bytes of eight bits in the last dimension, the lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits << shifts).sum(-1, dtype=torch.uint8)


# The sixteen values of IQ4_NL and IQ4_XS (ggml's kvalues_iq4nl).
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


# The sixteen values of MXFP4, doubled (ggml's kvalues_mxfp4): four-bit floats of the OCP's specification.
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


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


def mxfp4_codes(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of MXFP4, uint8 [n, 17]: exponents, biased by 127, [n, 1], and codes [n, 32]."""
    power, codes = _cut(blocks, 1, 16)
    return power, _halves(codes)


def _mxfp4(blocks: Tensor) -> Tensor:
    power, codes = mxfp4_codes(blocks)
    numbers = torch.tensor(_E2M1, dtype=torch.float64, device=codes.device)[codes.int()]
    return (numbers * (power.double() - 128).exp2()).float()


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "f32": partial(_float, dtype=torch.float32), "f16": _half, "bf16": partial(_float, dtype=torch.bfloat16),
    "q8_0": _q8_0, "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q2_k": _q2_k, "q3_k": _q3_k,
    "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k, "iq4_nl": _iq4_nl, "iq4_xs": _iq4_xs,
    "mxfp4": _mxfp4,
}  # fmt: skip
"""By the name of a type: from blocks [n, bytes] to float32 [n, entries]."""
