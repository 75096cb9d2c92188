"""Triton: pairs of a token and an expert are brought into the order of experts on the device, and cut into tiles of
pairs of one expert. Launches have the same shapes whatever was chosen."""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import launch_triton, zeroed
from graphllm.ir.pdl import gdc_wait_early

_MOST_READ = 4096  # pairs up to which every program counts all of them
_COUNTED, _PLACED, _FEW_PLACED = 1024, 128, 16  # pairs of a program
_WRITERS = 4  # programs that write tiles


class Order(NamedTuple):
    """Pairs in the order of experts.

    pairs: pairs by place, [P] int32. Of one expert's pairs the order may depend on the run if there are many.
    tiles: of each tile its expert, its first place and its pairs, and in the last row how many tiles there are,
        [tiles + 1, 3] int32.
    counts: scratch that whoever reads the tiles first must leave as zeros, int32; None if there is none.
    """

    pairs: Tensor
    tiles: Tensor
    counts: Tensor | None


@triton.jit(do_not_specialize_on_alignment=["P"])
def count_kernel(
    experts_ptr,  # [P] int32, negative for none
    counts_ptr,  # [2, N_PAD] of zeros; the pairs of each expert are added to the first row
    P,
    N_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    EMULATED: tl.constexpr,
):
    gdc_wait_early(EMULATED)
    counts = _counts(experts_ptr, tl.program_id(0) * BLOCK, P, N_PAD, BLOCK)
    tl.atomic_add(counts_ptr + tl.arange(0, N_PAD), counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _counts(experts_ptr, begin, end, N_PAD: tl.constexpr, BLOCK: tl.constexpr):
    """[N_PAD]: how many pairs each expert has of BLOCK pairs, or of those before ``end``."""
    pair = begin + tl.arange(0, BLOCK)
    expert = tl.load(experts_ptr + pair, mask=pair < end, other=-1)
    none = tl.sum((expert < 0).to(tl.int32), axis=0)  # counted with expert 0
    return tl.histogram(tl.maximum(expert, 0), N_PAD) - tl.where(tl.arange(0, N_PAD) == 0, none, 0)


@triton.jit(do_not_specialize_on_alignment=["P"])
def place_kernel(
    experts_ptr,  # [P]
    counts_ptr,  # [2, N_PAD]: the pairs of each expert, and zeros, to which the places are added that programs take
    order_ptr,  # [P] int32: pairs in the order of experts
    tiles_ptr,  # [TILES + 1, 3] int32: expert, first place in that order, pairs; and how many tiles there are
    P, N_PAD: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, TILES: tl.constexpr,
    READ: tl.constexpr,  # at least P, if every program counts all pairs; else 0
    EMULATED: tl.constexpr,
):  # fmt: skip
    """The first BLOCKS programs place pairs, the others write tiles."""
    gdc_wait_early(EMULATED)
    block = tl.program_id(0)
    n = tl.arange(0, N_PAD)
    if block < BLOCKS:
        pair = block * BLOCK + tl.arange(0, BLOCK)
        expert = tl.load(experts_ptr + pair, mask=pair < P, other=-1)
        if READ:
            other = tl.arange(0, READ)[None, :]
            chosen = tl.load(experts_ptr + other, mask=other < P, other=-1)
            earlier = (chosen == expert[:, None]) & (other < pair[:, None])
            place = tl.sum((earlier | ((chosen >= 0) & (chosen < expert[:, None]))).to(tl.int32), axis=1)
        else:
            total = tl.load(counts_ptr + n)
            counts = _counts(experts_ptr, block * BLOCK, P, N_PAD, BLOCK)
            taken = tl.atomic_add(counts_ptr + N_PAD + n, counts, mask=counts > 0, sem="relaxed")
            earlier = (expert[None, :] == expert[:, None]) & (pair[None, :] < pair[:, None])
            first = tl.gather(tl.cumsum(total, axis=0) - total + taken, tl.maximum(expert, 0), 0)
            place = first + tl.sum(earlier.to(tl.int32), axis=1)
        tl.store(order_ptr + place, pair, mask=expert >= 0)
    else:
        total = _counts(experts_ptr, 0, P, N_PAD, READ) if READ else tl.load(counts_ptr + n)
        begin = tl.cumsum(total, axis=0) - total
        tiles = (total + BLOCK_T - 1) // BLOCK_T
        first_tile = tl.cumsum(tiles, axis=0) - tiles
        if block == BLOCKS:
            tl.store(tiles_ptr + TILES * 3, tl.sum(tiles, axis=0))
        for i in range(block - BLOCKS, tl.max(tiles, axis=0), tl.num_programs(0) - BLOCKS):
            tile = tiles_ptr + (first_tile + i) * 3
            tl.store(tile, n, mask=i < tiles)
            tl.store(tile + 1, begin + i * BLOCK_T, mask=i < tiles)
            tl.store(tile + 2, tl.minimum(total - i * BLOCK_T, BLOCK_T), mask=i < tiles)


def most_tiles(pairs: int, N: int, block_t: int) -> int:
    """Of ``block_t`` pairs of one of N experts, however they are chosen."""
    return max(1, min(pairs, N + pairs // block_t))


def in_order(experts_TA: Tensor, P: int, N: int, config: Mapping[str, int]) -> Order:
    """The P pairs of a token and one of N experts. config: the most ``pairs`` and ``tiles``, and the pairs ``block_t``
    of a tile."""
    emulated, padded, pairs = triton.knobs.runtime.interpret, max(32, triton.next_power_of_2(N)), config["pairs"]
    read = pairs <= _MOST_READ
    block = _FEW_PLACED if read else _PLACED
    blocks = -(-pairs // block)
    order, tiles = (experts_TA.new_empty(shape) for shape in ((P,), (config["tiles"] + 1, 3)))
    counts = None if read else zeroed(experts_TA, 2 * padded)
    if counts is not None:
        launch_triton(
            count_kernel, (-(-pairs // _COUNTED),), experts_TA, counts, P, N_PAD=padded, BLOCK=_COUNTED,
            EMULATED=emulated, num_warps=4,
        )  # fmt: skip
    launch_triton(
        place_kernel, (blocks + _WRITERS,), experts_TA, experts_TA if counts is None else counts, order, tiles, P,
        N_PAD=padded, BLOCKS=blocks, BLOCK=block, BLOCK_T=config["block_t"], TILES=config["tiles"],
        READ=triton.next_power_of_2(pairs) if read else 0, EMULATED=emulated, num_warps=4,
    )  # fmt: skip
    return Order(order, tiles, counts)
