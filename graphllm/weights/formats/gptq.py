"""GPTQ, AWQ and AutoRound checkpoints: unsigned integers with a scale and a zero point for each group of inner entries,
packed into 32-bit words. The matrix is stored transposed, [inner, rows].

gptq-BITS-GROUP and gptqv2-BITS-GROUP: Frantar et al. 2022 as AutoGPTQ and GPTQModel write it. ``g_idx`` names the group
of each inner entry, by activation. Version 1 stores zero points less one. gptq_ordered, gptqv2_ordered: groups are in
order, and with the ending "index" there is a ``g_idx`` that says so. gptq_sym, gptq_sym_ordered: the zero point is the
middle, whatever the convention is by which it is stored. awq-GROUP: Lin et al. 2023, the "gemm" layout: eight rows of a
word by turns. A group of 0 is a whole row.

Scales are float16; families that end with another dtype have scales of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from graphllm.config import ConfigError
from graphllm.host.libraries import Libraries
from graphllm.weights.encodings import Encoding, Part, register_family
from graphllm.weights.formats.bits import unpacked
from graphllm.weights.formats.grouped import SCALES, grouped_integers, grouped_name

_WHOLE = 1 << 30  # inner entries are never sliced: g_idx may name any group
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word of AWQ each of eight rows is


def _groups(inner: int, group: int) -> int:
    return -(-inner // group) if group else 1


def _gptq(name: str, bits: int, group: int, more: int | None, index: bool, ordered: bool, scales: str) -> Encoding:
    """more: what is added to stored zero points; None where they are the middle. index: there is a g_idx. ordered:
    groups are in order. scales: their dtype."""
    step = 32 if bits == 3 else 32 // bits  # integers that fill words
    line = step * bits // 32
    half = 1 << bits - 1

    def numbers_of(parts: Mapping[str, Tensor], rows: int, inner: int) -> tuple[Tensor, Tensor, Tensor]:
        """Integers [inner, rows], zero points [groups, rows], and the group of each inner entry."""
        numbers = unpacked(parts["qweight"], bits, 0, inner)
        of = torch.arange(inner, device=numbers.device) // (group or inner)
        if index:
            stored = parts["g_idx"].long()
            trivial = not stored.any()  # as some programs write it for groups in order
            if ordered and not trivial and not torch.equal(stored - stored[0], of):
                raise ConfigError(
                    "g_idx: groups are not in order, though desc_act in config.json's quantization_config is false; "
                    "set it to true"
                )
            of = of if ordered or trivial else stored
        return numbers, zeros_of(unpacked(parts["qzeros"], bits, 1, rows)), of

    def zeros_of(stored: Tensor) -> Tensor:
        if more is not None:
            return stored + more
        for middle in (half - 1, half):
            if bool((stored == middle).all()):
                return torch.full_like(stored, half)
        raise ConfigError(
            f"qzeros: not all are {half - 1} or all {half}, though sym in config.json's quantization_config is true; "
            "set it to false"
        )

    def decode(parts: Mapping[str, Tensor], rows: int, inner: int) -> Tensor:
        numbers, zeros, of = numbers_of(parts, rows, inner)
        return ((numbers - zeros[of]).float() * parts["scales"].float()[of]).T

    def repack(
        parts: Mapping[str, Tensor], rows: int, inner: int, libraries: Libraries | None = None
    ) -> Mapping[str, Tensor]:
        numbers, zeros, _ = numbers_of(parts, rows, inner)
        return grouped_integers(numbers.T - half, bits, group, parts["scales"], zeros - half)

    parts = [
        Part("qweight", "int32", lambda rows, inner: (-(-inner // step) * line, rows), "{stem}.qweight"),
        Part("qzeros", "int32", lambda rows, inner: (_groups(inner, group), -(-rows // step) * line), "{stem}.qzeros"),
        Part("scales", scales, lambda rows, inner: (_groups(inner, group), rows), "{stem}.scales"),
    ]
    if index:
        parts.append(Part("g_idx", "int32", lambda rows, inner: (inner,), "{stem}.g_idx"))
    block = (step, max(step, group) if ordered else _WHOLE)
    same = ((grouped_name(bits, scales, group, zeros=True), repack),) if ordered else ()
    return Encoding(name, tuple(parts), block, None, decode, repacked=same)


def _awq(name: str, group: int, scales: str) -> Encoding:
    def rows_of(words: Tensor) -> Tensor:
        order = torch.tensor(_AWQ_ORDER, device=words.device)
        return unpacked(words, 4, 1, words.shape[1] * 8).unflatten(1, (-1, 8))[:, :, order].flatten(1)

    def decode(parts: Mapping[str, Tensor], rows: int, inner: int) -> Tensor:
        of = torch.arange(inner, device=parts["scales"].device) // (group or inner)
        numbers, zeros = rows_of(parts["qweight"]), rows_of(parts["qzeros"])
        return ((numbers - zeros[of]).float() * parts["scales"].float()[of]).T

    def repack(
        parts: Mapping[str, Tensor], rows: int, inner: int, libraries: Libraries | None = None
    ) -> Mapping[str, Tensor]:
        return grouped_integers(
            rows_of(parts["qweight"]).T - 8, 4, group, parts["scales"], rows_of(parts["qzeros"]) - 8
        )

    parts = (
        Part("qweight", "int32", lambda rows, inner: (inner, rows // 8), "{stem}.qweight"),
        Part("qzeros", "int32", lambda rows, inner: (_groups(inner, group), rows // 8), "{stem}.qzeros"),
        Part("scales", scales, lambda rows, inner: (_groups(inner, group), rows), "{stem}.scales"),
    )
    same = ((grouped_name(4, scales, group, zeros=True), repack),)
    return Encoding(name, parts, (8, group or 1), None, decode, repacked=same)


for _dtype in SCALES:
    _end = "" if _dtype == "float16" else f"_{_dtype}"
    for _name, _more in (("gptq", 1), ("gptqv2", 0), ("gptq_sym", None)):
        for _order, _index in (("", True), ("_ordered", False), ("_ordered_index", True)):
            _made = partial(_gptq, more=_more, index=_index, ordered=bool(_order), scales=_dtype)
            register_family(f"{_name}{_order}{_end}", _made)
    register_family("awq" + _end, partial(_awq, scales=_dtype))
