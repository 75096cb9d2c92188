"""The encodings int8 and int4: integers with one scale for each group of inner entries of a row, packed for
`quant_linear`; its docstring says what every bit means.

`pack` is the specification; the kernels of an artifact for a CPU can do the same at the speed of a read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from graphllm.host.libraries import Libraries
from graphllm.ops.gemm.quant_linear.op import dequantize
from graphllm.weights.encodings import Encoding, Part, register_encoding

BLOCK = 16  # rows that lie side by side in a packed matrix
_GRAIN = 32767  # numbers; torch splits larger elementwise work among its threads, and the caller has threads of its own


def _encoding(name: str, bits: int, group: int, dtype: str) -> Encoding:
    """Integers of ``bits`` bits with one scale for each ``group`` of inner entries. dtype: of the packed integers."""

    def values(rows: int, inner: int) -> tuple[int, ...]:
        """Blocks of rows, groups, lines of a group, rows of a block, bytes of a line and row."""
        blocks, groups, _ = scales(rows, inner)
        return (blocks, groups, group * bits // 32, BLOCK, 4)

    def scales(rows: int, inner: int) -> tuple[int, int, int]:
        """Blocks of rows, groups, rows of a block."""
        return (-(-rows // BLOCK), -(-inner // group), BLOCK)

    def decode(parts: Mapping[str, Tensor], rows: int, inner: int) -> Tensor:
        return dequantize(parts["values"], parts["scales"], rows, inner)

    def write(numbers: Tensor, parts: Mapping[str, Tensor], row: int, entry: int, libraries: Libraries | None) -> None:
        pack(numbers, found, parts["values"], parts["scales"], row, entry, libraries)

    found = Encoding(
        name,
        (Part("values", dtype, values), Part("scales", "bfloat16", scales, "{source}_scale")),
        (BLOCK, group), "quant_linear", decode, pack=write, moe_op="quant_moe",
    )  # fmt: skip
    return register_encoding(found)


# int8 with 64 entries a scale is 8.25 bits a weight, int4 with 32 is 4.5; bench/notes/cpu_quantized.md has the errors
# of other sizes.
INTEGERS = {e.name: e for e in (_encoding("int8", 8, 64, "int8"), _encoding("int4", 4, 32, "uint8"))}


def pack(
    numbers: Tensor,
    encoding: Encoding,
    values: Tensor,
    scales: Tensor,
    row: int = 0,
    entry: int = 0,
    libraries: Libraries | None = None,
) -> None:
    """Quantize ``numbers`` [R, I], of any floating dtype, and write them into a packed matrix.

    values, scales: the whole packed matrix. row, entry: where the first number belongs in it; entry is a multiple of
    the group. Rows and entries that pad a group or a block are left as they are. libraries: see `Encoding`.
    """
    kind = "bf16" if numbers.dtype == torch.bfloat16 else "f32"
    function = libraries.find(f"graphllm_pack_{encoding.name}_{kind}") if libraries else None
    if function is None or values.device.type != "cpu":
        _pack(numbers, encoding, values, scales, row, entry)
        return
    numbers = numbers.contiguous() if kind == "bf16" else numbers.float().contiguous()
    addresses = (ctypes.c_void_p(t.data_ptr()) for t in (numbers, values, scales))
    sizes = (*numbers.shape, numbers.stride(0), values.shape[1], row, entry)
    function.restype = None
    function(*addresses, *map(ctypes.c_int64, sizes))


def _pack(numbers: Tensor, encoding: Encoding, values: Tensor, scales: Tensor, row: int, entry: int) -> None:
    """`pack` without a compiled routine."""
    group = encoding.block[1]
    words = values.view(torch.int32).flatten(1, 2).squeeze(-1)  # [blocks, lines of all groups, 16]
    wide = max(group, _GRAIN // BLOCK // group * group)
    for at in range(0, numbers.shape[1], wide):
        part = numbers[:, at : at + wide]
        groups = -(-part.shape[1] // group)
        first = (entry + at) // group
        lines = words[:, first * values.shape[2] : (first + groups) * values.shape[2]]
        step = max(1, _GRAIN // (groups * group) // BLOCK) * BLOCK
        begin, end = row, row + len(part)
        while begin < end:
            inside, left = begin % BLOCK, end - begin
            # Up to the next edge of a block, then whole blocks, then what is left.
            count = min(BLOCK - inside, left) if inside else min(step, left // BLOCK * BLOCK) or left
            rounded, scale = quantize(part[begin - row : begin - row + count], encoding)
            rows = min(count, BLOCK)
            blocks = slice(begin // BLOCK, begin // BLOCK + count // rows)
            lanes = slice(inside, inside + rows)
            lines[blocks, :, lanes].copy_(rounded.view(-1, rows, rounded.shape[1]).transpose(1, 2))
            scales[blocks, first : first + groups, lanes].copy_(scale.view(-1, rows, groups).transpose(1, 2))
            begin += count


def quantize(numbers: Tensor, encoding: Encoding) -> tuple[Tensor, Tensor]:
    """Rows [R, I] as 32-bit words of packed integers, [R, words], and bfloat16 scales [R, groups].

    The scale is rounded first, and integers are multiples of that. int8: the largest number of a group becomes 127 or
    -127. int4: the largest becomes -8, with a scale of the opposite sign, so that all sixteen integers are used. A
    group with a number that is not finite has such a scale.
    """
    group, eight_bits = encoding.block[1], encoding.name == "int8"
    R, inner = numbers.shape
    groups = -(-inner // group)
    numbers = numbers.contiguous().float()
    if inner % group:
        numbers = torch.nn.functional.pad(numbers, (0, groups * group - inner))
    numbers = numbers.reshape(R, groups, group)
    if eight_bits:
        scales = (numbers.abs().amax(-1) / 127).bfloat16()
    else:
        high, low = numbers.amax(-1), numbers.neg().amax(-1)
        scales = (torch.where(low > high, low, -high) / 8 + 0.0).bfloat16()  # no -0, whatever zero was the largest
    divisor = torch.where(scales == 0, 1.0, scales.float())
    numbers = torch.div(numbers, divisor.unsqueeze(-1)).nan_to_num_(0.0).round_()
    if eight_bits:
        return numbers.clamp_(-127, 127).to(torch.int8).view(R, -1).view(torch.int32), scales
    fours = numbers.clamp_(-8, 7).add_(8).to(torch.uint8).view(torch.int32).view(R, -1, 2)
    return fours[:, :, 0] | fours[:, :, 1] << 4, scales
