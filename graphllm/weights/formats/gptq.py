"""GPTQ, AWQ and AutoRound checkpoints: unsigned integers with a scale and a zero point for each group of inner entries,
packed into 32-bit words. The matrix is stored transposed, [inner, rows].

gptq-BITS-GROUP and gptqv2-BITS-GROUP: Frantar et al. 2022 as AutoGPTQ and GPTQModel write it. ``g_idx`` names the group
of each inner entry, in order or, with desc_act, by activation. Version 1 stores zero points less one. autoround: as
version 1 without ``g_idx``. awq-GROUP: Lin et al. 2023, the "gemm" layout: eight rows of a word by turns. A group of 0
is a whole row.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from graphllm.weights.encodings import Encoding, Part, register_family
from graphllm.weights.formats.bits import unpacked

_WHOLE = 1 << 30  # inner entries are never sliced: g_idx may name any group
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word of AWQ each of eight rows is


def _groups(inner: int, group: int) -> int:
    return -(-inner // group) if group else 1


def _gptq(name: str, bits: int, group: int, more: int, ordered: bool) -> Encoding:
    """more: what is added to stored zero points. ordered: there is no g_idx."""
    step = 32 if bits == 3 else 32 // bits  # integers that fill words
    line = step * bits // 32

    def decode(parts: Mapping[str, Tensor], rows: int, inner: int) -> Tensor:
        numbers = unpacked(parts["qweight"], bits, 0, inner)  # [inner, rows]
        zeros = unpacked(parts["qzeros"], bits, 1, rows) + more
        of = torch.arange(inner, device=numbers.device) // (group or inner) if ordered else parts["g_idx"].long()
        return ((numbers - zeros[of]).float() * parts["scales"].float()[of]).T

    parts = [
        Part("qweight", "int32", lambda rows, inner: (-(-inner // step) * line, rows), "{stem}.qweight"),
        Part("qzeros", "int32", lambda rows, inner: (_groups(inner, group), -(-rows // step) * line), "{stem}.qzeros"),
        Part("scales", "float16", lambda rows, inner: (_groups(inner, group), rows), "{stem}.scales"),
    ]
    if not ordered:
        parts.append(Part("g_idx", "int32", lambda rows, inner: (inner,), "{stem}.g_idx"))
    return Encoding(name, tuple(parts), (step, max(step, group) if ordered else _WHOLE), None, decode)


def _awq(name: str, group: int) -> Encoding:
    def rows_of(words: Tensor) -> Tensor:
        order = torch.tensor(_AWQ_ORDER, device=words.device)
        return unpacked(words, 4, 1, words.shape[1] * 8).unflatten(1, (-1, 8))[:, :, order].flatten(1)

    def decode(parts: Mapping[str, Tensor], rows: int, inner: int) -> Tensor:
        of = torch.arange(inner, device=parts["scales"].device) // (group or inner)
        numbers, zeros = rows_of(parts["qweight"]), rows_of(parts["qzeros"])
        return ((numbers - zeros[of]).float() * parts["scales"].float()[of]).T

    parts = (
        Part("qweight", "int32", lambda rows, inner: (inner, rows // 8), "{stem}.qweight"),
        Part("qzeros", "int32", lambda rows, inner: (_groups(inner, group), rows // 8), "{stem}.qzeros"),
        Part("scales", "float16", lambda rows, inner: (_groups(inner, group), rows), "{stem}.scales"),
    )
    return Encoding(name, parts, (8, group or 1), None, decode)


register_family("gptq", lambda name, bits, group: _gptq(name, bits, group, 1, ordered=False))
register_family("gptqv2", lambda name, bits, group: _gptq(name, bits, group, 0, ordered=False))
register_family("autoround", lambda name, bits, group: _gptq(name, bits, group, 1, ordered=True))
register_family("awq", _awq)
