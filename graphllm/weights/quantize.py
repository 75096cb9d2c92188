"""Round matrices to a `Format` and pack them as `quant_linear` reads them, a few rows at a time.

`pack` is the specification; the kernels of an artifact for a CPU can do the same at the speed of a read, which
`Packer` uses where they are.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphllm.weights.formats import BLOCK, Format

_GRAIN = 32767  # numbers; torch splits larger elementwise work among its threads, and the caller has threads of its own


KERNELS = Path("pieces") / "kernels.so"  # in an artifact


class Packer:
    """`pack`, by a compiled routine where there is one. library: an artifact's ``kernels.so``, which may be missing and
    has the routines if it has the kernels of `quant_linear`."""

    def __init__(self, library: Path | None = None) -> None:
        self._library = ctypes.CDLL(str(library)) if library is not None and library.exists() else None

    def pack(self, numbers: Tensor, fmt: Format, values: Tensor, scales: Tensor, row: int = 0, entry: int = 0) -> None:
        """As the function `pack`."""
        kind = "bf16" if numbers.dtype == torch.bfloat16 else "f32"
        function: Any = getattr(self._library, f"graphllm_pack_{fmt.name}_{kind}", None)
        if function is None or values.device.type != "cpu":
            pack(numbers, fmt, values, scales, row, entry)
            return
        numbers = numbers.contiguous() if kind == "bf16" else numbers.float().contiguous()
        addresses = (ctypes.c_void_p(t.data_ptr()) for t in (numbers, values, scales))
        sizes = (*numbers.shape, numbers.stride(0), values.shape[1], row, entry)
        function.restype = None
        function(*addresses, *map(ctypes.c_int64, sizes))


def pack(numbers: Tensor, fmt: Format, values: Tensor, scales: Tensor, row: int = 0, entry: int = 0) -> None:
    """Quantize ``numbers`` [R, I], of any floating dtype, and write them into a packed matrix.

    values, scales: the whole packed matrix, of the shapes that ``fmt`` gives. row, entry: where the first number
    belongs in it; entry is a multiple of the group. Rows and entries that pad a group or a block are left as they are.
    """
    words = values.view(torch.int32).flatten(1, 2).squeeze(-1)  # [blocks, lines of all groups, 16]
    wide = max(fmt.group, _GRAIN // BLOCK // fmt.group * fmt.group)
    for at in range(0, numbers.shape[1], wide):
        part = numbers[:, at : at + wide]
        groups = -(-part.shape[1] // fmt.group)
        first = (entry + at) // fmt.group
        lines = words[:, first * values.shape[2] : (first + groups) * values.shape[2]]
        step = max(1, _GRAIN // (groups * fmt.group) // BLOCK) * BLOCK
        begin, end = row, row + len(part)
        while begin < end:
            inside, left = begin % BLOCK, end - begin
            # Up to the next edge of a block, then whole blocks, then what is left.
            count = min(BLOCK - inside, left) if inside else min(step, left // BLOCK * BLOCK) or left
            rounded, scale = quantize(part[begin - row : begin - row + count], fmt)
            rows = min(count, BLOCK)
            blocks = slice(begin // BLOCK, begin // BLOCK + count // rows)
            lanes = slice(inside, inside + rows)
            lines[blocks, :, lanes].copy_(rounded.view(-1, rows, rounded.shape[1]).transpose(1, 2))
            scales[blocks, first : first + groups, lanes].copy_(scale.view(-1, rows, groups).transpose(1, 2))
            begin += count


def quantize(numbers: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Rows [R, I] as 32-bit words of packed integers, [R, words], and bfloat16 scales [R, groups].

    The scale is rounded first, and integers are multiples of that. int8: the largest number of a group becomes 127 or
    -127. int4: the largest becomes -8, with a scale of the opposite sign, so that all sixteen integers are used. A
    group with a number that is not finite has such a scale.
    """
    R, inner = numbers.shape
    groups = -(-inner // fmt.group)
    numbers = numbers.contiguous().float()
    if inner % fmt.group:
        numbers = torch.nn.functional.pad(numbers, (0, groups * fmt.group - inner))
    numbers = numbers.reshape(R, groups, fmt.group)
    if fmt.bits == 8:
        scales = (numbers.abs().amax(-1) / 127).bfloat16()
    else:
        high, low = numbers.amax(-1), numbers.neg().amax(-1)
        scales = (torch.where(low > high, low, -high) / 8 + 0.0).bfloat16()  # no -0, whatever zero was the largest
    divisor = torch.where(scales == 0, 1.0, scales.float())
    numbers = torch.div(numbers, divisor.unsqueeze(-1)).nan_to_num_(0.0).round_()
    if fmt.bits == 8:
        return numbers.clamp_(-127, 127).to(torch.int8).view(R, -1).view(torch.int32), scales
    fours = numbers.clamp_(-8, 7).add_(8).to(torch.uint8).view(torch.int32).view(R, -1, 2)
    return fours[:, :, 0] | fours[:, :, 1] << 4, scales
