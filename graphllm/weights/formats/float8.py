"""float8 checkpoints: E4M3 numbers with float scales that they are multiplied with.

fp8-ROWS-INNER: a scale for each block of ROWS rows and INNER inner entries, 0 for all of them: fp8-0-0 has one for the
matrix, fp8-1-0 one for each row, fp8-128-128 is that of DeepSeek-V3. fp8_inv: the same, its scales called
``weight_scale_inv``, though they are multiplied with as well. fp8_static, fp8_inv_static: with ``input_scale``, which
activations were divided by; it does not change the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from graphllm.host.libraries import Libraries
from graphllm.ops.encodings.encoded_weights import packed
from graphllm.weights.encodings import Encoding, Part, register_family

Shape = Callable[[int, int], tuple[int, ...]]


def _blocks(extent: int, block: int) -> int:
    return -(-extent // block) if block else 1


def scaled(
    name: str, dtype: str, rows: int, inner: int, scale: str, more: tuple[Part, ...] = (),
    values: str = "{stem}.weight",
) -> Encoding:  # fmt: skip
    """Numbers of a dtype, stored under the name ``values``, with a scale, under that name, for each block of rows and
    inner entries; 0: for all."""

    def shape(r: int, i: int) -> tuple[int, int]:
        return _blocks(r, rows), _blocks(i, inner)

    def decode(parts: Mapping[str, Tensor], r: int, i: int) -> Tensor:
        scales = parts["scales"].float()
        for dim, (block, extent) in enumerate(((rows, r), (inner, i))):
            if block > 1:
                scales = scales.repeat_interleave(block, dim).narrow(dim, 0, extent)
        return parts["values"].float() * scales

    def repack(parts: Mapping[str, Tensor], r: int, i: int, libraries: Libraries | None = None) -> Mapping[str, Tensor]:
        scales = parts["scales"].float().repeat_interleave(rows or r, 0)[:r]
        return {"values": packed(parts["values"].view(torch.uint8), form, inner), "scales": scales.T.contiguous()}

    parts = (Part("values", dtype, lambda r, i: (r, i), values), Part("scales", "float32", shape, scale), *more)
    form, same = ("float8", f"float8-{inner}") if dtype == "float8_e4m3fn" else ("int8", f"byte_f32-{inner}")
    return Encoding(name, parts, (rows or 1, inner or 1), None, decode, repacked=((same, repack),))


def _make(scale: str, more: tuple[Part, ...], name: str, rows: int, inner: int) -> Encoding:
    return scaled(name, "float8_e4m3fn", rows, inner, scale, more)


_INPUT = (Part("input_scale", "float32", lambda rows, inner: (1,), "{stem}.input_scale"),)
for _family, _scale in (("fp8", "{stem}.weight_scale"), ("fp8_inv", "{stem}.weight_scale_inv")):
    register_family(_family, partial(_make, _scale, ()))
    register_family(f"{_family}_static", partial(_make, _scale, _INPUT))
