"""Triton kernels for sample_shares: of greedy rows and of rows without a filter, ranks tell each other the best of each
chunk of their tokens. Only rows with top-k, top-p or min-p are put together, and then sampled from as by `sample`.

What ranks tell each other goes through exchange memory: `graphllm.ops.collectives.all_reduce.triton_exchange`.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, exchange, launch_triton
from graphllm.ir.exchange import MOST_RANKS, OWN, exchange_bytes
from graphllm.ops.collectives.all_reduce.triton_exchange import arrived, exchange_half, peer_slot
from graphllm.ops.sampling.sample.operands import Sampling
from graphllm.ops.sampling.sample.triton_sample import (
    BLOCK,
    KEY_SHIFT,
    best_of,
    chunks_of,
    filters,
    is_filtered,
    launch_sample,
    off_top,
    race_of,
    row_bits_of,
)
from graphllm.ops.sampling.sample_shares.op import sample_shares

_OWN = tl.constexpr(OWN)
_MOST_ROWS = 2048
_PART = 4096  # logits that a program gives in a turn, at most
_PROGRAMS = 512


@triton.jit
def _rank(exchange_ptr):
    """This rank: the first where kernels are built and timed, where there is none. A token before 0 could be -1, which
    says in exchange memory that nothing has arrived."""
    return tl.maximum(tl.load(exchange_ptr + _OWN), 0).to(tl.int32)


@triton.jit
def _scan_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, sample_index_ptr, exchange_ptr,
    found_ptr,  # [S, 3, C] int32: of each chunk the largest logit, the best race value, both as bits, and the token
    N: tl.constexpr, V: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The scan of `sample` over this rank's tokens, without what filters need."""
    chunk = tl.program_id(0)
    s = tl.program_id(1)
    first = _rank(exchange_ptr) * N
    count = tl.minimum(N, V - first)
    row_ptr = logits_ptr + s.to(tl.int64) * ROW
    TILES: tl.constexpr = (N + BLOCK - 1) // BLOCK
    PER_CHUNK: tl.constexpr = (TILES + CHUNKS - 1) // CHUNKS
    lo = tl.minimum(chunk * PER_CHUNK, TILES)
    hi = tl.minimum(lo + PER_CHUNK, TILES)
    _, top, token = best_of(row_ptr, lo, hi, count, N - 1, COL, BLOCK)
    score = tl.zeros([], tl.float32)
    temperature = tl.load(temperature_ptr + s)
    by_k, by_p, by_min = filters(tl.load(top_k_ptr + s), tl.load(top_p_ptr + s), tl.load(min_p_ptr + s), V)
    if (temperature > 0) & (not (by_k | by_p | by_min)):
        top_logit = tl.where(top == float("-inf"), 0.0, top)
        rate = 1.4426950408889634 / temperature
        scaled_top = tl.div_rn(top_logit, temperature)
        row_bits = row_bits_of(tl.load(seed_ptr + s), tl.load(sample_index_ptr + s))
        token, score = race_of(
            row_ptr, lo, hi, count, first, N - 1, token, row_bits, temperature, top_logit, scaled_top, rate, COL, BLOCK
        )
    at = found_ptr + s * (3 * CHUNKS) + chunk
    tl.store(at, top.to(tl.int32, bitcast=True))
    tl.store(at + CHUNKS, score.to(tl.int32, bitcast=True))
    tl.store(at + 2 * CHUNKS, first + token)


@triton.jit
def _told(k, chunk, region, exchange_ptr, half, own, CHUNKS: tl.constexpr, RANKS: tl.constexpr):
    """One of a row's three lists of all ranks: a tuple of int32 [C]."""
    PEERS: tl.constexpr = 1 if RANKS == 2 else RANKS
    at = region + k * CHUNKS + chunk
    found = (own,) if RANKS == 2 else ()
    for peer in tl.static_range(PEERS):
        here = peer_slot(exchange_ptr, peer, half, False, RANKS, tl.int32)
        found += (arrived(here, at, chunk >= 0),)
    return found


@triton.jit
def _tell_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, exchange_ptr, found_ptr,
    whole_ptr,  # [S, V]: filled for the rows that have a filter
    out_ptr, N: tl.constexpr, V: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, CHUNKS: tl.constexpr,
    RANKS: tl.constexpr,
    REGION: tl.constexpr,  # bytes of a slot that a program has
    PART: tl.constexpr, TURNS: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """Programs [S, columns]: the first of a row without a filter finds its token, programs of other rows fill the
    row."""
    PEERS: tl.constexpr = 1 if RANKS == 2 else RANKS
    s = tl.program_id(0)
    column = tl.program_id(1)
    columns = tl.num_programs(1)
    program = s * columns + column
    half = exchange_half(exchange_ptr, TURNS)
    rank = _rank(exchange_ptr)
    temperature = tl.load(temperature_ptr + s)
    if is_filtered(temperature_ptr + s, top_k_ptr + s, top_p_ptr + s, min_p_ptr + s, V):
        SIZE: tl.constexpr = logits_ptr.dtype.element_ty.primitive_bitwidth
        WORD: tl.constexpr = tl.int32 if SIZE == 32 else tl.int16
        LARGEST: tl.constexpr = 0x7FFFFFFF if SIZE == 32 else 0x7FFF
        lane = tl.arange(0, PART)
        at = program * (REGION // (SIZE // 8)) + lane
        row_ptr = whole_ptr + s.to(tl.int64) * V
        for turn in range(TURNS):
            n = (turn * columns + column) * PART + lane
            words = tl.load(logits_ptr + s.to(tl.int64) * ROW + n * COL, mask=n < N, other=0.0)
            words = words.to(WORD, bitcast=True)
            words = tl.where(words == -1, LARGEST, words).to(WORD)
            turn_half = (half + turn) % 2
            for peer in tl.static_range(PEERS):
                there = peer_slot(exchange_ptr, peer, turn_half, True, RANKS, WORD)
                tl.store(there + at, words, mask=n < N)
            if PEERS == 1:
                inside = (n < N) & (rank * N + n < V)
                tl.store(row_ptr + rank * N + n, words.to(logits_ptr.dtype.element_ty, bitcast=True), mask=inside)
            for peer in tl.static_range(PEERS):
                here = peer_slot(exchange_ptr, peer, turn_half, False, RANKS, WORD)
                words = arrived(here, at, n < N)
                first = (1 - rank if PEERS == 1 else peer) * N
                inside = (n < N) & (first + n < V)
                tl.store(row_ptr + first + n, words.to(logits_ptr.dtype.element_ty, bitcast=True), mask=inside)
            if not EMULATED:  # what was emptied is so before the peer can know that this turn has ended
                tl.inline_asm_elementwise(
                    "fence.acq_rel.sys; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
                )  # fmt: skip
    else:
        if column == 0:
            chunk = tl.arange(0, CHUNKS)
            region = program * (REGION // 4)
            own = found_ptr + s * (3 * CHUNKS) + chunk
            top_bits, score_bits, ids = tl.load(own), tl.load(own + CHUNKS), tl.load(own + 2 * CHUNKS)
            for peer in tl.static_range(PEERS):
                there = peer_slot(exchange_ptr, peer, half, True, RANKS, tl.int32) + region + chunk
                tl.store(there, top_bits)
                tl.store(there + CHUNKS, score_bits)
                tl.store(there + 2 * CHUNKS, ids)
            tops = _told(0, chunk, region, exchange_ptr, half, top_bits, CHUNKS, RANKS)
            scores = _told(1, chunk, region, exchange_ptr, half, score_bits, CHUNKS, RANKS)
            tokens = _told(2, chunk, region, exchange_ptr, half, ids, CHUNKS, RANKS)
            top_logit = float("-inf")
            for r in tl.static_range(RANKS):
                top_logit = tl.maximum(top_logit, tl.max(tops[r].to(tl.float32, bitcast=True), axis=0))
            possible = top_logit > float("-inf")
            best, token = float("-inf"), V
            for r in tl.static_range(RANKS):
                chunk_top = tops[r].to(tl.float32, bitcast=True)
                score = chunk_top
                if temperature > 0:
                    top = tl.div_rn(tl.where(possible, top_logit, 0.0), temperature)
                    score = scores[r].to(tl.float32, bitcast=True) + off_top(chunk_top, temperature, top)
                highest = tl.max(score, axis=0)
                lowest_id = tl.min(tl.where(score == highest, tokens[r], V), axis=0)
                token = tl.where(
                    highest > best, lowest_id, tl.where(highest == best, tl.minimum(token, lowest_id), token)
                )
                best = tl.maximum(best, highest)
            tl.store(out_ptr + s, tl.where(possible, token, -1))


def _configs(site: CallSite) -> Sequence[Mapping[str, int]]:
    return ({"rows": max(site.rows("logits_SN"), 1)},)


def _supports(site: CallSite) -> bool:
    logits, ranks = site.args["logits_SN"], site.args["ranks"]
    few = site.rows("logits_SN") <= _MOST_ROWS and 1 < ranks <= MOST_RANKS
    return few and logits.dtype in KEY_SHIFT and site.args["width"] < BLOCK * 2**15


@sample_shares.impl("triton_sample_shares", device="cuda", supports=_supports, configs=_configs)
def triton_sample_shares(logits_SN: Tensor, sampling: Sampling, ranks: int, width: int, *, rows: int) -> Tensor:
    """Four launches; the last two find nothing to do where no row has a filter. rows: at most."""
    S, N = logits_SN.shape
    columns = max(1, min(16, _PROGRAMS // rows))
    region = exchange_bytes(ranks) // (1 << (rows * columns - 1).bit_length())
    part = min(_PART, region // logits_SN.element_size())
    turns = -(-N // (part * columns)) | 1  # odd: see `exchange_half`
    chunks = chunks_of(S, N)
    found = torch.empty((S, 3, chunks), dtype=torch.int32, device=logits_SN.device)
    whole_SV, out_S = logits_SN.new_empty((S, width)), found.new_empty(S)
    sizes = {"N": N, "V": width, "ROW": logits_SN.stride(0), "COL": logits_SN.stride(1), "CHUNKS": chunks}
    launch_triton(
        _scan_kernel, (chunks, S), logits_SN, *sampling, exchange(logits_SN, ranks), found,
        **sizes, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    launch_triton(
        _tell_kernel, (S, columns), logits_SN, *sampling[:4], exchange(logits_SN, ranks), found, whole_SV, out_S,
        **sizes, RANKS=ranks, REGION=region, PART=part, TURNS=turns, EMULATED=triton.knobs.runtime.interpret,
        num_warps=8,
    )  # fmt: skip
    launch_sample(whole_SV, sampling, out_S, filtered=True)
    return out_S
