"""Inputs for the cases of ops that read tiles of GGUF blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir.testing import Maker
from graphllm.ops.encodings.gguf_blocks import ROWS, TILED


def random_tiles(make: Maker, kind: str, rows: int, inner: int, scale: float) -> Tensor:
    """Tiles of random bytes, with normal numbers times ``scale`` as scales and minima."""
    form = TILED[kind]
    shape = (-(-rows // ROWS), inner // form.entries)
    tiles, at = make.integers(0, 256, *shape, ROWS * form.nbytes, dtype=torch.uint8), 0
    for field in form.fields:
        if field.unit == 2:
            halves = make.normal(*shape, ROWS, scale=scale, dtype=torch.float16).view(torch.uint8)
            tiles[..., ROWS * at : ROWS * (at + 2)] = halves
        at += field.nbytes
    return tiles
