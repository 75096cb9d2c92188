"""Sums over ranks by kernels that write into each other's memory: `graphllm.ir.exchange` has the layout.

A program writes its numbers into the peers' memory, then waits for theirs in its own. On the way are numbers of the
dtype alone, without signals: one trip over the link. Programs of one launch wait for the programs of the same number on
other ranks only, and all write before they wait, so it does not matter when each of them starts.

A rank writes into a half that it used two calls ago, which everybody has read and emptied by then: it has the numbers
of the call before from everybody, who began that one when the one before it had ended.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, exchange, launch_triton
from graphllm.ir.exchange import COUNTER, EXCHANGE_BYTES, GIVE, MOST_RANKS, TAKE
from graphllm.ops.all_reduce.op import all_reduce

_COUNTER, _GIVE, _TAKE = tl.constexpr(COUNTER), tl.constexpr(GIVE), tl.constexpr(TAKE)
_CALL = tl.constexpr(1 << 20)  # what a launch adds to the counter, however many programs it has
_SLOT = tl.constexpr(EXCHANGE_BYTES)
_MOST_THREADS = tl.constexpr(1024)  # of a program
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BLOCK = 1024  # numbers of a program


@triton.jit
def exchange_half(exchange_ptr):
    """Which half of the memory this launch uses. Every program must call it once, behind `gdc_wait`: a launch counts
    when all have."""
    programs = tl.num_programs(0) * tl.num_programs(1)
    first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    share = tl.where(first, _CALL + 1 - programs, 1).to(tl.int64)
    before = tl.atomic_add(exchange_ptr + _COUNTER, share, sem="relaxed")
    return (before // _CALL) % 2


@triton.jit
def peer_slot(exchange_ptr, peer, half, GIVE: tl.constexpr, RANKS: tl.constexpr, WORD: tl.constexpr):
    """Where to write for a peer, or where it writes. WORD: the type of integers that numbers are given as."""
    address = tl.load(exchange_ptr + (_GIVE if GIVE else _TAKE) + peer) + half * (RANKS * _SLOT)
    return tl.multiple_of(address.to(tl.pointer_type(WORD), bitcast=True), 16)


@triton.jit
def arrived(here, at, inside):
    """The integers that a peer writes at places of a slot, as soon as all are there; the places are empty then."""
    words = tl.load(here + at, mask=inside, other=0, volatile=True)
    while tl.max((words == -1).to(tl.int32), axis=0) > 0:
        words = tl.load(here + at, mask=inside, other=0, volatile=True)
    if at.shape[0] < _MOST_THREADS:  # several threads have a number then, of which one alone may have seen it
        tl.debug_barrier()
        words = tl.load(here + at, mask=inside, other=0, volatile=True)
    tl.debug_barrier()  # nobody empties what another thread has not seen
    tl.store(here + at, tl.full(at.shape, -1, here.dtype.element_ty), mask=inside)
    return words


@triton.jit
def sum_over_ranks(own, at, inside, exchange_ptr, half, DTYPE: tl.constexpr, RANKS: tl.constexpr):
    """The sum over the ranks of ``own``, float32 numbers that are rounded to the dtype first, in the order of the
    ranks. at: the places of these numbers among those of the launch, which no other program has."""
    PEERS: tl.constexpr = 1 if RANKS == 2 else RANKS
    WIDE: tl.constexpr = DTYPE.primitive_bitwidth == 32
    WORD: tl.constexpr = tl.int32 if WIDE else tl.int16
    LARGEST: tl.constexpr = 0x7FFFFFFF if WIDE else 0x7FFF
    rounded = own.to(DTYPE)
    words = rounded.to(WORD, bitcast=True)
    words = tl.where(words == -1, LARGEST, words).to(WORD)  # one NaN in place of another
    for peer in tl.static_range(PEERS):
        tl.store(peer_slot(exchange_ptr, peer, half, True, RANKS, WORD) + at, words, mask=inside)
    total = tl.zeros_like(own)
    if PEERS == 1:
        total += rounded.to(tl.float32)
    for peer in tl.static_range(PEERS):
        words = arrived(peer_slot(exchange_ptr, peer, half, False, RANKS, WORD), at, inside)
        total += words.to(DTYPE, bitcast=True).to(tl.float32)
    return total


@triton.jit
def _sum_kernel(
    x_ptr,
    out_ptr,
    exchange_ptr,
    count,  # of groups of UNIT numbers
    UNIT: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    EMULATED: tl.constexpr,
):
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count * UNIT
    own = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    half = exchange_half(exchange_ptr)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    total = sum_over_ranks(own, at, inside, exchange_ptr, half, dtype, RANKS)
    tl.store(out_ptr + at, total.to(dtype), mask=inside)


def fits_exchange(site: CallSite, name: str, width: int, ranks: int) -> bool:
    """Whether the rows of an argument, of so many numbers, are few enough to be summed by a kernel of this file."""
    x = site.args[name]
    return ranks <= MOST_RANKS and site.rows(name) * width * x.element_size() <= EXCHANGE_BYTES


def _supports(site: CallSite) -> bool:
    x, ranks = site.args["x"], site.args["ranks"]
    row = 1
    for size in x.shape[1:]:
        row *= site.largest(size)
    return x.dim() > 0 and x.dtype in _DTYPES and ranks > 1 and fits_exchange(site, "x", row, ranks)


@all_reduce.impl("exchange", device="cuda", supports=_supports)
def exchanged(x: Tensor, ranks: int) -> Tensor:
    """Up to ``EXCHANGE_BYTES``: one kernel."""
    x = x.contiguous()
    out, count = torch.empty_like(x), x.numel()
    unit = 8 if isinstance(x.shape[-1], int) and x.shape[-1] % 8 == 0 else 1
    launch_triton(
        _sum_kernel, (-(-count // _BLOCK),), x, out, exchange(x, ranks), count // unit, UNIT=unit, RANKS=ranks,
        BLOCK=_BLOCK, EMULATED=triton.knobs.runtime.interpret, num_warps=4,
    )  # fmt: skip
    return out
