"""Triton kernel for ngram_drafts: one program for each row, which ends at once where its row ends no sequence."""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import launch_triton
from graphllm.ops.speculation.ngram_drafts.cpu import whole
from graphllm.ops.speculation.ngram_drafts.op import LONGEST_RUN, ngram_drafts


@triton.jit
def _ngram_kernel(
    tokens_ptr, positions_ptr, slots_ptr, newest_ptr, history_ptr, drafts_ptr, runs_ptr,
    N: tl.constexpr, L: tl.constexpr, K: tl.constexpr, SMALLEST: tl.constexpr, LARGEST: tl.constexpr,
    LONGEST: tl.constexpr, K_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    own = tl.load(newest_ptr + r)
    if own == N - 1:
        tl.store(runs_ptr + r, 0)
        return
    text = history_ptr + own.to(tl.int64) * L
    end = tl.load(positions_ptr + r)
    i = tl.arange(0, K_PAD)
    row = r - i
    near = (i <= K) & (row >= 0)
    near &= tl.load(slots_ptr + row, mask=near, other=-1) == own
    tokens = tl.load(tokens_ptr + row, mask=near, other=0)
    tl.store(text + tl.load(positions_ptr + row, mask=near, other=0) % L, tl.maximum(tokens, 0), mask=near)
    tl.debug_barrier()

    looked = tl.minimum(L - K, end + 1)
    best = 0
    start = 1
    while start < looked:
        age = start + tl.arange(0, BLOCK)
        same = age < looked
        length = tl.zeros([BLOCK], tl.int32)
        for n in tl.static_range(LARGEST):
            if n <= end:
                here = same & (age + n < looked)
                then = tl.load(text + (end - age - n + L) % L, mask=here, other=-1)
                same = here & (then == tl.load(text + (end - n) % L))
            else:
                same = age < 0
            length += same.to(tl.int32)
        best = tl.maximum(best, tl.max(tl.where(length >= SMALLEST, length * L - age, 0), axis=0))
        start += BLOCK
        if best > (LARGEST - 1) * L:  # no run is longer, and none that is as long is nearer
            start = looked
    back = tl.maximum((L - best % L) % L, 1)
    # Ages are less than L, so a score is between the scores of two lengths.
    found = tl.load(text + (end - back + 1 + i % back + L) % L, mask=i < K, other=0)
    tl.store(drafts_ptr + own * K + i, tl.where(best > 0, found, -1), mask=i < K)

    n = tl.arange(0, LONGEST)
    compared = back + n < looked
    last = tl.load(text + (end - n + L) % L, mask=compared, other=-1)
    then = tl.load(text + (end - back - n + L) % L, mask=compared, other=-2)
    run = tl.min(tl.where(last == then, LONGEST, n), axis=0)
    tl.store(runs_ptr + r, tl.where(best > 0, run, 0))


_BLOCK = 1024


@ngram_drafts.impl("triton_ngram_drafts", device="cuda", supports=whole)
def triton_ngram_drafts(
    tokens_R: Tensor, positions_R: Tensor, slots_R: Tensor, newest_R: Tensor, history_NL: Tensor, drafts_NK: Tensor,
    smallest: int, largest: int,
) -> Tensor:  # fmt: skip
    """One launch."""
    (N, L), K = history_NL.shape, drafts_NK.shape[1]
    runs_R = tokens_R.new_empty(tokens_R.shape)
    launch_triton(
        _ngram_kernel, (tokens_R.shape[0],), tokens_R, positions_R, slots_R, newest_R, history_NL, drafts_NK, runs_R,
        N=N, L=L, K=K, SMALLEST=smallest, LARGEST=largest, LONGEST=LONGEST_RUN, K_PAD=1 << K.bit_length(),
        BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return runs_R
