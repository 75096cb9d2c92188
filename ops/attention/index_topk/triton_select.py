"""The Triton kernel that selects of index_topk: one program for each row of scores.

It looks for the topk-th largest number between bounds that come closer: each turn counts how many numbers reach three
places between them. A row that is short enough stays in registers. Then positions are written in order.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import launch_triton
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.attention.index_topk.operands import PagedKeys
from graphllm.ops.attention.index_topk.triton_scores import sequence_of

LEAST = tl.constexpr(-(1 << 31))


@triton.jit
def _reaching(numbers, first, second, third):
    """How many numbers [N, M] are at least each of three, by columns: 10 bits for each of the three counts."""
    counts = (numbers >= first).to(tl.int32) + ((numbers >= second).to(tl.int32) << 10)
    return tl.sum(counts + ((numbers >= third).to(tl.int32) << 20), axis=0)


@triton.jit
def _counts(columns):
    """The three counts of all columns together, each below 2^21."""
    wide = columns.to(tl.int64)
    total = tl.sum((wide & 1023) | (((wide >> 10) & 1023) << 21) | ((wide >> 20) << 42))
    return (total & 0x1FFFFF).to(tl.int32), ((total >> 21) & 0x1FFFFF).to(tl.int32), (total >> 42).to(tl.int32)


@triton.jit
def _next_bounds(lo, hi, above, counts, places, TOPK: tl.constexpr):
    """Bounds of the topk-th largest number, and how many numbers are above them.

    counts, places: how many numbers reach each of three places between the bounds, in ascending order.
    """
    low, middle, high = counts
    first, second, third = places
    new_lo = tl.where(high >= TOPK, third, tl.where(middle >= TOPK, second, tl.where(low >= TOPK, first, lo)))
    new_hi = tl.where(
        high >= TOPK, hi, tl.where(middle >= TOPK, third - 1, tl.where(low >= TOPK, second - 1, first - 1))
    )
    new_above = tl.where(high >= TOPK, above, tl.where(middle >= TOPK, high, tl.where(low >= TOPK, middle, low)))
    # Where exactly so many reach a place, they are what is looked for: nothing equal to the bound is missing.
    exact = (low == TOPK) | (middle == TOPK) | (high == TOPK)
    place = tl.where(high == TOPK, third, tl.where(middle == TOPK, second, first)) - 1
    new_lo, new_hi = tl.where(exact, place, new_lo), tl.where(exact, place, new_hi)
    return new_lo, new_hi, tl.where(exact, TOPK, new_above)


@triton.jit
def _places(lo, hi):
    """Three places between two bounds, above the lower one; the same ones near the end."""
    span = (hi - lo).to(tl.uint32, bitcast=True)  # may be above 2^31
    quarter, half = (span >> 2).to(tl.int32, bitcast=True), (span >> 1).to(tl.int32, bitcast=True)
    return lo + quarter + 1, lo + half + 1, hi - quarter


@triton.jit(do_not_specialize_on_alignment=["S"])
def _select_kernel(
    order_ptr,  # int32 [rows of the chunk, WIDTH]
    chosen_ptr,  # int32 [T, TOPK]
    query_start_ptr, seq_len_ptr, S,
    FIRST: tl.constexpr,  # row of the step with which the chunk begins
    WIDTH: tl.constexpr, TOPK: tl.constexpr,
    HELD: tl.constexpr,  # numbers that are kept in registers
    LANES: tl.constexpr,  # columns of numbers that a count goes through, below 1,024 numbers each
    BLOCK: tl.constexpr,  # positions that are written at once
    BLOCK_S: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    gdc_wait_early(EMULATED)
    row = FIRST + tl.program_id(0)
    if row < tl.load(query_start_ptr + S):
        s = sequence_of(query_start_ptr, row, S, BLOCK_S)
        n = tl.load(seq_len_ptr + s) - tl.load(query_start_ptr + s + 1) + row + 1
        order_ptr += tl.program_id(0).to(tl.int64) * WIDTH
        chosen_ptr += row.to(tl.int64) * TOPK
        if n <= TOPK:
            for base in range(0, TOPK, LANES):
                at = base + tl.arange(0, LANES)
                tl.store(chosen_ptr + at, tl.where(at < n, at, -1), mask=at < TOPK)
        else:
            if n <= HELD:
                h = (tl.arange(0, HELD // LANES) * LANES)[:, None] + tl.arange(0, LANES)[None, :]
                held = tl.load(order_ptr + h, mask=h < n, other=LEAST)
                lo = tl.min(tl.min(tl.where(h < n, held, 2147483647), axis=0))
                hi = tl.max(tl.max(held, axis=0))
                above = 0
                while lo < hi:
                    places = _places(lo, hi)
                    counts = _counts(_reaching(held, places[0], places[1], places[2]))
                    lo, hi, above = _next_bounds(lo, hi, above, counts, places, TOPK)
            else:
                g = (tl.arange(0, 4) * LANES)[:, None] + tl.arange(0, LANES)[None, :]
                most, least = tl.full([LANES], LEAST, tl.int32), tl.full([LANES], 2147483647, tl.int32)
                for base in range(0, n, 4 * LANES):
                    known = base + g < n
                    numbers = tl.load(order_ptr + base + g, mask=known, other=LEAST)
                    most = tl.maximum(most, tl.max(numbers, axis=0))
                    least = tl.minimum(least, tl.min(tl.where(known, numbers, 2147483647), axis=0))
                lo, hi, above = tl.min(least), tl.max(most), 0
                while lo < hi:
                    places = _places(lo, hi)
                    columns = tl.zeros([LANES], tl.int32)
                    for base in range(0, n, 4 * LANES):
                        numbers = tl.load(order_ptr + base + g, mask=base + g < n, other=LEAST)
                        columns += _reaching(numbers, places[0], places[1], places[2])
                    lo, hi, above = _next_bounds(lo, hi, above, _counts(columns), places, TOPK)
            missing = TOPK - above  # of the numbers that equal the bound, the first ones
            larger, equal = 0, 0
            i = tl.arange(0, BLOCK)
            for base in range(0, n, BLOCK):
                numbers = tl.load(order_ptr + base + i, mask=base + i < n, other=LEAST)
                is_equal = (numbers == lo) & (base + i < n)
                is_larger = numbers > lo
                counted = is_larger.to(tl.int32) + (is_equal.to(tl.int32) << 16)
                before = tl.cumsum(counted) - counted
                equal_before = equal + (before >> 16)
                place = larger + (before & 0xFFFF) + tl.minimum(equal_before, missing)
                tl.store(chosen_ptr + place, base + i, mask=is_larger | (is_equal & (equal_before < missing)))
                both = tl.sum(counted)
                larger += both & 0xFFFF
                equal += both >> 16


def choose(
    order: Tensor, chosen_TK: Tensor, paged: PagedKeys, first: int, rows: Any, *, held: int, block: int, warps: int
) -> None:
    """The best positions of the rows from ``first`` on, of their scores in ``order``.

    rows: of ``order``, or fewer.
    held: numbers that a program keeps in registers, at least 128 for each of its warps.
    block: positions that it writes at once, below 32,768.
    """
    _, _, query_start, seq_lens = paged
    launch_triton(
        _select_kernel, (rows,), order, chosen_TK, query_start, seq_lens, seq_lens.shape[0], FIRST=first,
        WIDTH=order.shape[1], TOPK=chosen_TK.shape[1], HELD=held, LANES=128 * warps, BLOCK=block, BLOCK_S=128,
        num_warps=warps, EMULATED=triton.knobs.runtime.interpret,
    )  # fmt: skip
