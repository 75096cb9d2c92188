"""Checkpoints of bitsandbytes.

nf4, fp4: four-bit codes of a table of 16 numbers (Dettmers et al. 2023 for NormalFloat), two a byte, the first in the
upper half, with one scale for each block of entries of the whole matrix in row-major order. nf4_nested, fp4_nested:
double quantization, the scales are codes of a table themselves. A JSON text next to them has the size of blocks.
nf4_rows: what plain numbers are rounded to, nf4 with blocks of 64 that begin where rows do.
llm_int8: int8 with one scale for each row, 127 times too large (Dettmers et al. 2022).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from graphllm.config import ConfigError
from graphllm.host.libraries import Libraries
from graphllm.ops.encodings.encoded_weights import packed
from graphllm.weights.encodings import Encoding, Part, register_encoding
from graphllm.weights.plan.expr import ANY

_BLOCK = 64
# The quantiles of a normal distribution that NormalFloat's codes stand for (Dettmers et al. 2023, appendix E).
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_WHOLE = 1 << 30  # blocks do not begin where rows do


def _decode(nested: bool, parts: Mapping[str, Tensor], rows: int, inner: int) -> Tensor:
    state = json.loads(parts["state"].cpu().numpy().tobytes())
    scales = parts["scales"]
    if nested:
        table, outer = parts["nested_table"].float(), parts["nested_scales"]
        spread = _spread("nested_blocksize", state, outer, len(scales))
        scales = table.index_select(0, scales.int()) * spread + state["nested_offset"]
    if list(state["shape"]) != [rows, inner]:
        raise ConfigError(f"quant_state: shape is {state['shape']}, the model needs [{rows}, {inner}]")
    codes = torch.arange(256, device=scales.device)
    pairs = parts["table"].float()[torch.stack([codes >> 4, codes & 15], 1)]
    numbers = pairs.index_select(0, parts["values"].flatten().int()).view(-1)
    return (numbers * _spread("blocksize", state, scales, rows * inner)).view(rows, inner)


def _spread(field: str, state: Mapping[str, int], scales: Tensor, count: int) -> Tensor:
    """Scales of blocks, one for each entry. Raises ConfigError where they are not as many as the blocks."""
    block = state[field]
    blocks = math.ceil(count / block)
    if len(scales) != blocks:
        raise ConfigError(
            f"quant_state: {field} is {block}, of {count} entries there would be {blocks} scales, not {len(scales)}; "
            "download it again"
        )
    return scales.float().repeat_interleave(block)[:count]


def _four_bits(kind: str, nested: bool) -> Encoding:
    def halves(rows: int, inner: int) -> tuple[int, int]:
        return -(-rows * inner // 2), 1

    parts = [
        Part("values", "uint8", halves),
        Part("scales", "uint8" if nested else "float32", lambda rows, inner: (ANY,), "{source}.absmax"),
        Part("table", "float32", lambda rows, inner: (16,), "{source}.quant_map"),
        Part("state", "uint8", lambda rows, inner: (ANY,), f"{{source}}.quant_state.bitsandbytes__{kind}"),
    ]
    if nested:
        parts.append(Part("nested_scales", "float32", lambda rows, inner: (ANY,), "{source}.nested_absmax"))
        parts.append(Part("nested_table", "float32", lambda rows, inner: (256,), "{source}.nested_quant_map"))
    name = f"{kind}{'_nested' * nested}"
    return Encoding(name, tuple(parts), (_WHOLE, _WHOLE), None, partial(_decode, nested))


def _decode_rows(parts: Mapping[str, Tensor], rows: int, inner: int) -> Tensor:
    table = torch.tensor(_NF4, device=parts["values"].device)
    numbers = table[parts["values"].int()].view(rows, -1, _BLOCK) * parts["scales"].unsqueeze(-1)
    return numbers.flatten(1)[:, :inner]


def _encode_rows(numbers: Tensor) -> Mapping[str, Tensor]:
    blocks = torch.nn.functional.pad(numbers.float(), (0, -numbers.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))
    scales = blocks.abs().amax(-1)
    table = torch.tensor(_NF4, device=numbers.device)
    scaled = blocks / torch.where(scales == 0, 1, scales).unsqueeze(-1)
    codes = torch.bucketize(scaled, (table[1:] + table[:-1]) / 2)
    return {"values": codes.to(torch.uint8).flatten(1), "scales": scales}


def _int8(parts: Mapping[str, Tensor], rows: int, inner: int) -> Tensor:
    if int(parts["layout"]):
        raise ConfigError(f"weight_format is {int(parts['layout'])}: only rows (0) can be read; save the model again")
    return parts["values"].float() * (parts["scales"].float() / 127).unsqueeze(1)


def _repacked(
    parts: Mapping[str, Tensor], rows: int, inner: int, libraries: Libraries | None = None
) -> Mapping[str, Tensor]:
    values = packed(parts["values"].view(torch.uint8), "int8", 0)
    return {"values": values, "scales": (parts["scales"].float() / 127).unsqueeze(0)}


register_encoding(
    Encoding(
        "nf4_rows",
        (  # never stored: a code has a byte here
            Part("values", "uint8", lambda rows, inner: (rows, -(-inner // _BLOCK) * _BLOCK)),
            Part("scales", "float32", lambda rows, inner: (rows, -(-inner // _BLOCK))),
        ),
        (1, _BLOCK), None, _decode_rows, _encode_rows,
    )
)  # fmt: skip
for _kind in ("nf4", "fp4"):
    for _nested in (False, True):
        register_encoding(_four_bits(_kind, _nested))
register_encoding(
    Encoding(
        "llm_int8",
        (
            Part("values", "int8", lambda rows, inner: (rows, inner)),
            Part("scales", "float32", lambda rows, inner: (rows,), "{stem}.SCB"),
            Part("layout", "uint8", lambda rows, inner: (1,), "{stem}.weight_format"),
        ),
        (1, 1), None, _int8, repacked=(("byte_f32-0", _repacked),),
    )
)  # fmt: skip
