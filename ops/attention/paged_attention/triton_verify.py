"""Triton kernel for sequences of few query tokens, split-KV as in triton_decode: steps that verify drafts, and in steps
with prompts the sequences that have few new tokens behind a context.

One program attends for one sequence, one range of the context and one KV head: the query heads of all the sequence's
tokens are the rows of a tile, which for few tokens is no larger than the one that decode pads. The step's own keys and
values are a first, small tile of range 0, which also stores them into the cache.

In steps with prompts, the cache has the step's keys and values already, and a sequence may have several blocks of
query tokens, each with its own programs: what stands before a block is its context.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite
from graphllm.ops.attention.paged_attention.op import paged_attention
from graphllm.ops.attention.paged_attention.operands import Paged, Rotary, Rows, Scores
from graphllm.ops.attention.paged_attention.triton_common import (
    as_entries,
    as_queries,
    attends,
    count_bits,
    load_angles,
    load_bits,
    load_heads,
    load_norm,
    load_scales,
    load_sinks,
    multiply,
    plus_tile,
    power_of_2,
    prefetch_lines,
    problem,
    rotate,
    scores_of,
    tile_blocks,
    tile_slots,
)
from graphllm.ops.attention.paged_attention.triton_decode import (
    FEW_RANGES,
    Config,
    in_turns,
    join_as_last,
    joined_rows,
    launch_decode,
    launch_split,
    load_tile,
    plan_splits,
    range_cells,
    ranges_of,
    split_bounds,
)

_MOST_ROWS = 64  # query heads of a KV head, times tokens
_MOST_QUERIES = 8  # of a block, in steps with prompts
_BLOCKS = 16  # of all sequences in such a step
_FEW_SEQUENCES = 64  # in such a step, if they are divided by this kernel
_FEW_RANGES, _FEW_LEAST = 32, 256  # most of a block, least tokens of one
_FEW_PLAN = {"warps": 4, "stages": 2}
_FEW_JOINED = 2 * FEW_RANGES
_PROGRAMS = 512
_MANY, _LONG = 256, 2048  # from _MANY pairs of sequence and KV head on, ranges have at least _LONG tokens


@triton.jit
def _verify_kernel(
    q_ptr, k_ptr, v_ptr, cache_ptr, out_ptr,
    partial_ptr,  # float32 [S, blocks, Q, splits, H, E]
    lse_ptr,
    arrived_ptr,  # [S * blocks * KV heads] int32, zero before and after
    table_ptr, query_start_ptr, seq_len_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, sinks_ptr, kv_scales_ptr,
    ancestors_ptr, Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr,
    V_ROW: tl.constexpr, V_HEAD: tl.constexpr, CACHE_BLOCK: tl.constexpr, CACHE_KV: tl.constexpr,
    CACHE_HEAD: tl.constexpr, CACHE_POS: tl.constexpr, TABLE_ROW: tl.constexpr,
    SCALE: tl.constexpr,  # of q.k, times log2(e) without a soft cap, divided by the cap with one
    LOG2E_CAP: tl.constexpr,  # soft cap times log2(e); 0 is off
    WINDOW: tl.constexpr,
    WRITE: tl.constexpr,  # store k and v into the cache (else the cache holds them already)
    H: tl.constexpr, K: tl.constexpr,
    G: tl.constexpr,  # query heads of a KV head
    Q: tl.constexpr,  # most query tokens of a block
    BLOCK_Q: tl.constexpr,  # at least Q
    M: tl.constexpr,  # rows of a tile: at least Q * G
    E: tl.constexpr, E_PAD: tl.constexpr, P: tl.constexpr,
    SPLITS: tl.constexpr,  # see `split_bounds`
    RANGES: tl.constexpr,  # of a sequence at most, a power of two
    FEW: tl.constexpr, MIN_TILES: tl.constexpr, LONG_TILES: tl.constexpr, BLOCK_N: tl.constexpr,
    LINE: tl.constexpr,  # entries in 128 bytes, a line of the cache
    LINES: tl.constexpr,  # such lines that a head's entries surely fill
    JOINED: tl.constexpr,  # rows that have their ranges joined at once
    FEW_JOINED: tl.constexpr,
    TURNS: tl.constexpr,  # ranges are joined in turns
    F: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, SINKS: tl.constexpr,
    SCALED: tl.constexpr, EMULATED: tl.constexpr,
    TREE: tl.constexpr,  # rows may be nodes of a tree
):  # fmt: skip
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0) % K
    skip = tl.program_id(0) // K * Q  # query tokens of the sequence before this block
    most = tl.num_programs(0) // K * Q  # a sequence with more is another kernel's
    s = tl.program_id(1)
    split = tl.program_id(2)  # the programs without work are the last ones
    splits = SPLITS
    if LONG_TILES > 0:
        splits = tl.num_programs(2)
    first_row = tl.load(query_start_ptr + s)
    all_queries = tl.load(query_start_ptr + s + 1) - first_row
    before = tl.load(seq_len_ptr + s) - all_queries + skip  # tokens that the cache holds
    row = first_row + skip
    mine = all_queries <= most
    if not WRITE:  # single tokens go as in decode
        mine = mine & (all_queries > 1)
    queries = tl.where(mine, tl.minimum(all_queries - skip, Q), 0)
    start, first, tiles, per_split = split_bounds(before + 1, splits, WINDOW, BLOCK_N, SPLITS, MIN_TILES, LONG_TILES)
    lo = first + split * per_split
    hi = tl.minimum(lo + per_split, first + tiles)
    table_row = table_ptr + s.to(tl.int64) * TABLE_ROW
    head_ptr = cache_ptr + head * CACHE_HEAD
    cache_block = tile_blocks(table_row, lo, before, P, BLOCK_N)
    j = tl.arange(0, BLOCK_Q)
    new = j < queries
    if WRITE:
        new_block = tl.load(table_row + (before + j) // P, mask=new, other=0).to(tl.int64)
    q_weight, q_other_weight = load_norm(q_norm_ptr, E, E_PAD, F, NORM)
    k_weight, k_other_weight = load_norm(k_norm_ptr, E, E_PAD, F, NORM)
    k_scale, v_scale = load_scales(kv_scales_ptr, SCALED)
    if not EMULATED:
        if (lo < hi) & (queries > 0):  # the first tile is on its way while the queries are still being made
            slot = head_ptr + tile_slots(cache_block, lo, CACHE_BLOCK, CACHE_POS, P, BLOCK_N)
            prefetch_lines(slot, CACHE_KV, LINE, LINES)
        tl.extra.cuda.gdc_wait()
    if (queries > 0) & ((split == 0) | (lo < hi)):
        m = tl.arange(0, M)
        e = tl.arange(0, E_PAD)
        in_e = (e < E)[None, :]
        query = m // G
        heads = head * G + m % G
        valid = query < queries
        token = (row + query).to(tl.int64)
        q_row = q_ptr + (token * Q_ROW + heads * Q_HEAD)[:, None]
        q, q_other = load_heads(q_row, valid[:, None], E, E_PAD, F)
        q_cos, q_sin = load_angles(token[:, None], valid[:, None], cos_ptr, sin_ptr, E_PAD, F)
        q = rotate(q, q_other, q_weight, q_other_weight, q_cos, q_sin, E, F, NORM, EPS)
        q, powers = as_queries(q, cache_ptr.dtype.element_ty)
        row_scale = (SCALE * k_scale * powers)[:, None]
        stands = query  # positions after the first row; windows count by that
        bits = load_bits(ancestors_ptr, token, valid, TREE)
        if TREE and WINDOW > 0:
            stands = tl.where(bits < 0, query, count_bits(bits, 64) - 1)
        top = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, E_PAD], tl.float32)
        if split == 0:  # begins with the sinks and the step's own tokens
            new_token = (row + j).to(tl.int64)
            k_row = k_ptr + (new_token * K_ROW + head * K_HEAD)[:, None]
            k_new, k_other = load_heads(k_row, new[:, None], E, E_PAD, F)
            v_row = v_ptr + (new_token * V_ROW + head * V_HEAD)[:, None]
            v_new = tl.load(v_row + e[None, :], mask=new[:, None] & in_e, other=0.0)
            k_cos, k_sin = load_angles(new_token[:, None], new[:, None], cos_ptr, sin_ptr, E_PAD, F)
            k_new = rotate(k_new, k_other, k_weight, k_other_weight, k_cos, k_sin, E, F, NORM, EPS)
            k_entry = as_entries(k_new, k_scale, cache_ptr.dtype.element_ty, SCALED, EMULATED)
            v_entry = as_entries(v_new, v_scale, cache_ptr.dtype.element_ty, SCALED, EMULATED)
            if WRITE:
                slot = (head_ptr + new_block * CACHE_BLOCK + ((before + j) % P) * CACHE_POS)[:, None] + e[None, :]
                tl.store(slot, k_entry, mask=new[:, None] & in_e)
                tl.store(slot + CACHE_KV, v_entry, mask=new[:, None] & in_e)
            new_scores = scores_of(q, k_entry.to(q.dtype), row_scale, LOG2E_CAP, EMULATED)
            seen = j[None, :] <= query[:, None]
            if TREE:
                node = ((bits[:, None] >> j[None, :].to(tl.int64)) & 1) != 0
                seen = tl.where((bits < 0)[:, None], seen, node)
            seen = seen & new[None, :]
            if WINDOW > 0:
                new_stands = j
                if TREE:
                    new_bits = load_bits(ancestors_ptr, new_token, new, TREE)
                    new_stands = tl.where(new_bits < 0, j, count_bits(new_bits, 64) - 1)
                seen = seen & (new_stands[None, :] > stands[:, None] - WINDOW)
            new_scores = tl.where(seen, new_scores, float("-inf"))
            top = tl.max(new_scores, axis=1)
            if SINKS:
                sink = load_sinks(sinks_ptr, heads, valid)
                top = tl.maximum(top, sink)
                total = tl.exp2(sink - top)
            new_p = tl.exp2(new_scores - tl.where(top == float("-inf"), 0.0, top)[:, None])
            total += tl.sum(new_p, axis=1)
            acc = multiply(new_p.to(q.dtype), v_entry.to(q.dtype), acc, EMULATED)

        for tile in range(lo, hi):
            at = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            keys, values, there = load_tile(
                head_ptr, cache_block, tile, start, before, CACHE_BLOCK, CACHE_KV, CACHE_HEAD, CACHE_POS, WINDOW, 1, E,
                E_PAD, P, BLOCK_N,
            )  # fmt: skip
            keys, values = keys.to(q.dtype), values.to(q.dtype)
            cache_block = tile_blocks(table_row, tile + 1, before, P, BLOCK_N)
            scores = scores_of(q, keys, row_scale, LOG2E_CAP, EMULATED)
            counts = there[None, :]
            if WINDOW > 0:
                counts = counts & (at[None, :] > before + stands[:, None] - WINDOW)
            scores = tl.where(counts, scores, float("-inf"))
            # Later tokens may see nothing of a tile.
            top, total, acc = plus_tile(scores, values, top, total, acc, WINDOW > 0, EMULATED)

        if WINDOW > 0:
            total = tl.where(total > 0, total, 1.0)
        acc = acc * (v_scale / total)[:, None]
        if tiles <= per_split:
            out = out_ptr + ((token * H + heads) * E)[:, None] + e[None, :]
            tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=valid[:, None] & in_e)
        else:
            base = (s.to(tl.int64) * (most // Q) + skip // Q) * Q * splits
            at_split = (base + query * splits + split) * H + heads
            tl.store(partial_ptr + (at_split * E)[:, None] + e[None, :], acc, mask=valid[:, None] & in_e)
            tl.store(lse_ptr + at_split, top + tl.log2(total), mask=valid)
            join_as_last(
                arrived_ptr + s * tl.num_programs(0) + tl.program_id(0), partial_ptr, lse_ptr, out_ptr, base, splits,
                tiles, per_split, row.to(tl.int64), head, queries * G, H, Q * G, G, E, E_PAD, RANGES, FEW, JOINED,
                FEW_JOINED, TURNS,
            )  # fmt: skip


def is_verification(site: CallSite) -> bool:
    """Whether this kernel serves the site."""
    rows = site.bucket.query_len * site.args["q_THE"].shape[1] // site.args["kv_cache"].shape[2]
    return site.bucket.kind == "decode" and site.bucket.query_len > 1 and rows <= _MOST_ROWS and attends(site)


def is_mixed(site: CallSite) -> bool:
    """Whether kernels of ragged batches serve the site; steps of one token or few of each sequence have their own."""
    few = is_verification(site)
    return (site.bucket.kind == "mixed" or site.bucket.query_len > 1) and not few and attends(site)


def verify_configs(site: CallSite) -> list[Config]:
    """The plan of decode, with one KV head a program. There are more rows than in decode: joining their ranges takes
    longer, so where there are programs enough these are long, and rows are joined many at once, however few ranges,
    since each turn waits for memory; half as many where registers for more would leave room for one program less on a
    processor."""
    cache, table, queries = site.args["kv_cache"], site.args["block_table"], site.bucket.query_len
    H, (_, K, P, E) = site.args["q_THE"].shape[1], cache.shape[1:]
    plan = plan_splits(site.bucket.hi, site.bucket.lo, H, K, table.shape[1] * P, cache.dtype, E)
    least = plan["min_tiles"] // plan["heads"]
    if site.bucket.hi * K >= _MANY:
        least = max(least, _LONG // plan["block_n"])
    ranges = 4 * FEW_RANGES if in_turns(plan["splits"], plan["most"]) else power_of_2(plan["splits"], 2)
    joined = joined_rows(queries * H // K, E, ranges if ranges >= FEW_RANGES else 2 * ranges)
    return [
        {
            "queries": queries, "splits": plan["splits"], "most": plan["most"], "min_tiles": max(1, least),
            "long_tiles": max(1, least, plan["long_tiles"] // plan["heads"]), "joined": joined,
            "block_n": plan["block_n"], "warps": 4, "stages": 2,
        }
    ]  # fmt: skip


@paged_attention.impl("triton_verify", device="cuda", supports=is_verification, configs=verify_configs, remedy=problem)
def triton_verify(
    rows: Rows, paged: Paged, scores: Scores, kv_scales: Tensor | None, ancestors_T: Tensor | None,
    rotary: Rotary | None, *, queries: int, splits: int, most: int, **plan: int,
) -> Tensor:  # fmt: skip
    """Every sequence has at most ``queries`` query tokens."""
    out_THE = torch.empty_like(rows.q_THE, memory_format=torch.contiguous_format)
    K, S = paged.kv_cache.shape[2], paged.seq_lens.shape[0]
    _launch(
        rows, paged, out_THE, scores, kv_scales, ancestors_T, rotary, queries=queries, write=True,
        grid=(K, S, ranges_of(S, K, splits, most)), cells=queries * range_cells(S, K, splits, most),
        counters=S * K if most > 1 else 1, splits=splits, most=most, **plan,
    )  # fmt: skip
    return out_THE


def _launch(
    rows: Rows, paged: Paged, out_THE: Tensor, scores: Scores, kv_scales: Tensor | None, ancestors_T: Tensor | None,
    rotary: Rotary | None, *, queries: int, write: bool, **config: Any,
) -> None:  # fmt: skip
    (H, E), K = rows.q_THE.shape[1:], paged.kv_cache.shape[2]
    packed = queries * H // K
    launch_split(
        _verify_kernel, rows, paged, out_THE, scores, kv_scales, rotary,
        rows.q_THE if ancestors_T is None else ancestors_T, few_joined=joined_rows(packed, E, FEW_RANGES), WRITE=write,
        K=K, Q=queries, BLOCK_Q=power_of_2(queries), M=power_of_2(packed), TREE=ancestors_T is not None, **config,
    )  # fmt: skip


class Few(NamedTuple):
    """How a step with prompts divides its sequences of few query tokens, where sequences are few.

    on: 1 if they are, else 0: then such sequences are as others.
    queries: tokens of a block.
    blocks: of a sequence at most.
    splits: ranges of the context.
    most: of these in any launch.
    """

    on: int
    queries: int
    blocks: int
    splits: int
    most: int

    @property
    def left_out(self) -> int:
        """Query tokens of a sequence that the kernels of prompts leave out, at most."""
        return 1 + self.on * (self.queries * self.blocks - 1)


def plan_few(rows: Rows, paged: Paged, ancestors_T: Tensor | None) -> Few:
    """From sizes of a launch: the fewer sequences and tokens, the more blocks and ranges."""
    (T, H, _), S, K = rows.q_THE.shape, paged.seq_lens.shape[0], paged.kv_cache.shape[2]
    queries = min(_MOST_QUERIES, _MOST_ROWS * K // H)
    if queries < 2:
        return Few(0, 1, 1, 1, 1)
    blocks = 1
    if ancestors_T is None:
        blocks = torch.sym_max(1, torch.sym_min((T + queries - 1) // queries, _BLOCKS // S))
    most = max(1, min(_FEW_RANGES, paged.block_table.shape[1] * paged.kv_cache.shape[3] // _FEW_LEAST))
    splits = torch.sym_max(1, torch.sym_min(most, _PROGRAMS // (S * K * blocks)))
    return Few(torch.sym_min(1, _FEW_SEQUENCES // S), queries, blocks, splits, most)


def launch_few(
    few: Few, rows: Rows, paged: Paged, out_THE: Tensor, scores: Scores, kv_scales: Tensor | None,
    ancestors_T: Tensor | None, rotary: Rotary | None,
) -> None:  # fmt: skip
    """Attend for the sequences of a step with prompts that have few query tokens, as ``few`` says, and as in decode for
    those that have one. The cache holds the step's keys and values."""
    (H, E), (K, P), S = rows.q_THE.shape[1:], paged.kv_cache.shape[2:4], paged.seq_lens.shape[0]
    plan = plan_splits(0, 1, H, K, paged.block_table.shape[1] * P, rows.q_THE.dtype, E)
    if few.queries > 1:
        _launch(
            rows, paged, out_THE, scores, kv_scales, ancestors_T, rotary, queries=few.queries, write=False,
            grid=(few.on * K * few.blocks, S, few.splits),
            cells=few.queries * _PROGRAMS // K if few.most > 1 else 1,  # one range leaves nothing to join
            counters=_PROGRAMS, splits=1, most=few.most,
            joined=joined_rows(few.queries * H // K, E, _FEW_JOINED),
            min_tiles=1, long_tiles=max(1, _FEW_LEAST // plan["block_n"]), block_n=plan["block_n"], **_FEW_PLAN,
        )  # fmt: skip
    launch_decode(rows, paged, out_THE, scores, kv_scales, rotary, write=False, **plan)
