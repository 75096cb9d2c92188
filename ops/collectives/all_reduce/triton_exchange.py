"""Sums over ranks by kernels that write into each other's memory: `graphllm.ir.exchange` has the layout.

A program writes its numbers into the peers' memory, then waits for theirs in its own. On the way are numbers of the
dtype only, without signals: one trip over the link. With more than two ranks everything goes to everybody, so a large
count of numbers takes two trips: to the rank that owns their row, which adds them up, and the sum from there to all.
Programs of one launch wait for the programs of the same number on other ranks only, and all write before they wait; a
GPU begins programs in their order, so the lowest number that is not done everywhere runs, or has run, everywhere.

A rank writes into a half that it used two calls ago, which everybody has read and emptied by then: it has a sum of the
call before with numbers of everybody, who began that one when the one before it had ended.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, exchange, launch_triton
from graphllm.ir.exchange import COUNTER, GIVE, MOST_RANKS, OWN, TAKE, exchange_bytes
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.collectives.all_reduce.op import all_reduce

_COUNTER, _OWN, _GIVE, _TAKE = (tl.constexpr(place) for place in (COUNTER, OWN, GIVE, TAKE))
_CALL = tl.constexpr(1 << 20)  # what a launch adds to the counter, however many programs it has
_SLOT_OF_TWO, _SLOT_OF_MORE = tl.constexpr(exchange_bytes(2)), tl.constexpr(exchange_bytes(3))
# With fewer numbers several of a program's threads may have the same one, and only one may have seen it. Triton's
# interpreter reads a number's bytes one by one, so that one of them may be from before.
_SEEN_TWICE = tl.constexpr(1 << 30 if triton.knobs.runtime.interpret else 1024)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BLOCK = 1024  # numbers of a program
_TRIP = 480 << 10  # bytes that cross a link while another trip begins, on H200s


def one_trip(ranks: int, itemsize: int) -> int:
    """Up to how many numbers, of ``itemsize`` bytes, each rank gives all of its own to every other one."""
    if ranks == 2:
        return exchange_bytes(ranks)
    return _TRIP * ranks // ((ranks - 1) * (ranks - 2)) // itemsize


@triton.jit
def exchange_half(exchange_ptr, TURNS: tl.constexpr = 1):
    """Which half of the memory this launch uses. Every program must call it once, after `gdc_wait`: a launch counts
    when all have. TURNS: how often a program may give and take, an odd number; the halves take turns."""
    programs = tl.num_programs(0) * tl.num_programs(1)
    first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    share = tl.where(first, TURNS * _CALL + 1 - programs, 1).to(tl.int64)
    before = tl.atomic_add(exchange_ptr + _COUNTER, share, sem="relaxed")
    return (before // _CALL) % 2


@triton.jit
def peer_slot(exchange_ptr, peer, half, GIVE: tl.constexpr, RANKS: tl.constexpr, WORD: tl.constexpr):
    """Where to write for a peer, or where it writes. WORD: the type of integers that numbers are given as."""
    SLOT: tl.constexpr = _SLOT_OF_TWO if RANKS == 2 else _SLOT_OF_MORE
    address = tl.load(exchange_ptr + (_GIVE if GIVE else _TAKE) + peer) + half * (RANKS * SLOT)
    return tl.multiple_of(address.to(tl.pointer_type(WORD), bitcast=True), 16)


@triton.jit
def arrived(here, at, inside):
    """The integers that a peer writes at places of a slot, as soon as all are there; the places are empty then."""
    words = tl.load(here + at, mask=inside, other=0, volatile=True)
    while tl.max((words == -1).to(tl.int32), axis=0) > 0:
        words = tl.load(here + at, mask=inside, other=0, volatile=True)
    if at.shape[0] < _SEEN_TWICE:
        tl.debug_barrier()
        words = tl.load(here + at, mask=inside, other=0, volatile=True)
    tl.debug_barrier()  # nobody empties what another thread has not seen
    tl.store(here + at, tl.full(at.shape, -1, here.dtype.element_ty), mask=inside)
    return words


@triton.jit
def _numbers(words, DTYPE: tl.constexpr):
    return words.to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _sum_of_arrived(rounded, at, inside, exchange_ptr, half, own, DTYPE: tl.constexpr, RANKS: tl.constexpr,
                    WORD: tl.constexpr):  # fmt: skip
    """The sum of what all other ranks write at places of their slots and of ``rounded``, in the order of the ranks, as
    soon as all is there; the places are empty then."""
    missing = 1
    while missing > 0:
        empty = tl.zeros(at.shape, tl.int32)
        for peer in tl.static_range(RANKS):
            here = peer_slot(exchange_ptr, peer, half, False, RANKS, WORD)
            words = tl.load(here + at, mask=inside & (own != peer), other=0, volatile=True)
            empty += (words == -1).to(tl.int32)
        missing = tl.max(empty, axis=0)
    tl.debug_barrier()  # nobody empties what another thread has not seen
    total = tl.zeros_like(rounded)
    for peer in tl.static_range(RANKS):
        here = peer_slot(exchange_ptr, peer, half, False, RANKS, WORD) + at
        others = inside & (own != peer)
        words = tl.load(here, mask=others, other=0, volatile=True)
        total += tl.where(own == peer, rounded, _numbers(words, DTYPE))
        tl.store(here, tl.full(at.shape, -1, WORD), mask=others)
    return total.to(DTYPE).to(tl.float32)


@triton.jit
def sum_over_ranks(own, row, at, inside, few, exchange_ptr, half, DTYPE: tl.constexpr, RANKS: tl.constexpr):
    """The sum over the ranks of ``own``, float32 numbers that are rounded to the dtype first, in the order of the
    ranks; of more than two it is rounded as well. at: the places of these numbers in the launch, which no other program
    has; there are at least as many as threads. row: of the program. few: whether the launch has at most `one_trip`
    numbers."""
    WIDE: tl.constexpr = DTYPE.primitive_bitwidth == 32
    WORD: tl.constexpr = tl.int32 if WIDE else tl.int16
    LARGEST: tl.constexpr = 0x7FFFFFFF if WIDE else 0x7FFF
    rounded = own.to(DTYPE)
    words = rounded.to(WORD, bitcast=True)
    words = tl.where(words == -1, LARGEST, words).to(WORD)  # one NaN in place of another
    total = rounded.to(tl.float32)
    if RANKS == 2:
        tl.store(peer_slot(exchange_ptr, 0, half, True, RANKS, WORD) + at, words, mask=inside)
        total += _numbers(arrived(peer_slot(exchange_ptr, 0, half, False, RANKS, WORD), at, inside), DTYPE)
    else:
        rank = tl.load(exchange_ptr + _OWN)
        ranks = tl.zeros(at.shape, tl.int32) + rank.to(tl.int32)  # a mask with one number would not be one to Triton
        owner = (row % RANKS).to(tl.int64)
        if few:
            for peer in tl.static_range(RANKS):
                there = peer_slot(exchange_ptr, peer, half, True, RANKS, WORD)
                tl.store(there + at, words, mask=inside & (ranks != peer))
            total = _sum_of_arrived(total, at, inside, exchange_ptr, half, ranks, DTYPE, RANKS, WORD)
        elif owner == rank:
            total = _sum_of_arrived(total, at, inside, exchange_ptr, half, ranks, DTYPE, RANKS, WORD)
            words = total.to(DTYPE).to(WORD, bitcast=True)
            words = tl.where(words == -1, LARGEST, words).to(WORD)
            for peer in tl.static_range(RANKS):
                there = peer_slot(exchange_ptr, peer, half, True, RANKS, WORD)
                tl.store(there + at, words, mask=inside & (ranks != peer))
        else:
            tl.store(peer_slot(exchange_ptr, owner, half, True, RANKS, WORD) + at, words, mask=inside)
            total = _numbers(arrived(peer_slot(exchange_ptr, owner, half, False, RANKS, WORD), at, inside), DTYPE)
    return total


@triton.jit(do_not_specialize_on_alignment=["count"])
def _sum_kernel(
    x_ptr, out_ptr, exchange_ptr,
    count,  # of groups of UNIT numbers
    UNIT: tl.constexpr, RANKS: tl.constexpr,
    FEW: tl.constexpr,  # numbers at most
    BLOCK: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    gdc_wait_early(EMULATED)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count * UNIT
    own = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    half = exchange_half(exchange_ptr)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    few = count * UNIT <= FEW
    total = sum_over_ranks(own, tl.program_id(0), at, inside, few, exchange_ptr, half, dtype, RANKS)
    tl.store(out_ptr + at, total.to(dtype), mask=inside)


def fits_exchange(site: CallSite, name: str, width: int, ranks: int) -> bool:
    """Whether the rows of an argument, of ``width`` numbers, are few enough to be summed by a kernel of this file."""
    x = site.args[name]
    return ranks <= MOST_RANKS and site.rows(name) * width * x.element_size() <= exchange_bytes(ranks)


def _supports(site: CallSite) -> bool:
    x, ranks = site.args["x"], site.args["ranks"]
    row = 1
    for size in x.shape[1:]:
        row *= site.largest(size)
    return x.dim() > 0 and x.dtype in _DTYPES and ranks > 1 and fits_exchange(site, "x", row, ranks)


@all_reduce.impl("exchange", device="cuda", supports=_supports)
def exchanged(x: Tensor, ranks: int) -> Tensor:
    """Up to `exchange_bytes`: one kernel."""
    x = x.contiguous()
    out, count = torch.empty_like(x), x.numel()
    unit = 8 if isinstance(x.shape[-1], int) and x.shape[-1] % 8 == 0 else 1
    launch_triton(
        _sum_kernel, (-(-count // _BLOCK),), x, out, exchange(x, ranks), count // unit, UNIT=unit, RANKS=ranks,
        FEW=one_trip(ranks, x.element_size()), BLOCK=_BLOCK, EMULATED=triton.knobs.runtime.interpret, num_warps=4,
    )  # fmt: skip
    return out
