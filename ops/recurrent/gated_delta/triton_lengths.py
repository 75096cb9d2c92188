"""Which sequences of a step go by chunks, and which token by token, for kernels of gated_delta on a GPU."""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = tl.constexpr(64)  # tokens
CHUNKED = 32  # tokens from which on a sequence goes by chunks


@triton.jit
def find_sequence(start_ptr, place, S, CHUNKED: tl.constexpr, OF: tl.constexpr, BLOCK_S: tl.constexpr):
    """A sequence, S if there is none, and the number of chunks before it.

    place: the number of a chunk (OF is "chunks"), or of a sequence among those with chunks ("long") or those that go
    token by token ("short").
    CHUNKED: tokens of a sequence from which on it has chunks.
    """
    s = 0
    chunks = 0
    before = 0
    for base in range(0, S, BLOCK_S):
        i = base + tl.arange(0, BLOCK_S)
        count = tl.load(start_ptr + 1 + i, mask=i < S, other=0) - tl.load(start_ptr + i, mask=i < S, other=0)
        own = tl.where(count >= CHUNKED, (count + CHUNK - 1) // CHUNK, 0)
        if OF == "chunks":
            unit = own
        elif OF == "long":
            unit = tl.minimum(own, 1)
        else:
            unit = tl.where(count < CHUNKED, tl.minimum(count, 1), 0)
        earlier = before + tl.cumsum(unit, 0) <= place
        s += tl.sum(tl.where(earlier, tl.where(i < S, 1, 0), 0))
        chunks += tl.sum(tl.where(earlier, own, 0))
        before += tl.sum(unit)
    return s, chunks
