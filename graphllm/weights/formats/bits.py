"""What the formats share: small integers packed into larger ones, four-bit floats, and scales spread over groups."""

from __future__ import annotations

import torch
from torch import Tensor

# The magnitudes of E2M1, by the three bits after the sign (OCP Microscaling Formats 1.0, section 5.3.3).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpacked(words: Tensor, bits: int, dim: int, count: int) -> Tensor:
    """Unsigned integers of ``bits`` bits, as int32, out of int32 words, lowest bits first; ``count`` of them
    along dimension ``dim``. An integer may lie in two words, as integers of 3 bits do."""
    words = words.movedim(dim, -1)
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
        found = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
        return found.flatten(-2)[..., :count].movedim(-1, dim)
    each = torch.arange(32, dtype=torch.int32, device=words.device)
    stream = ((words.unsqueeze(-1) >> each) & 1).flatten(-2)[..., : count * bits].unflatten(-1, (count, bits))
    places = torch.arange(bits, dtype=torch.int32, device=words.device)
    return (stream << places).sum(-1, dtype=torch.int32).movedim(-1, dim)


def nibbles(packed: Tensor) -> Tensor:
    """The two four-bit codes of each byte along the last dimension, the lower one first."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def e2m1(codes: Tensor) -> Tensor:
    """float32 numbers of four-bit codes: a sign, two bits of exponent, one of mantissa."""
    table = torch.tensor([*_E2M1, *(-x for x in _E2M1)], device=codes.device)
    return table[codes.long()]


def spread(scales: Tensor, inner: int) -> Tensor:
    """Scales [rows, groups] of equal groups as float32 for every entry, [rows, inner]."""
    groups = scales.shape[1]
    return scales.float().repeat_interleave(-(-inner // groups), 1)[:, :inner]
