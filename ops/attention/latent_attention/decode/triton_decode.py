"""Triton kernel of latent attention for decode and for verification: absorbed, all query heads share one KV head.

The cache is read as keys of L + R numbers, of which the first L are the values, too. Rows of a tile are the query
heads of all the tokens of a sequence. See `triton_absorb` for how sequences are divided among programs.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import functools
import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ops.attention.latent_attention.op import latent_attention
from graphllm.ops.attention.latent_attention.operands import LatentRows, PagedLatents, UpProjections
from graphllm.ops.attention.latent_attention.triton_absorb import (
    RECORD,
    Config,
    attend_absorbed,
    first_item,
    is_absorbed,
    plan_absorbed,
)
from graphllm.ops.attention.latent_attention.triton_common import cache_constants, load_latents, problem
from graphllm.ops.attention.paged_attention.triton_common import (
    load_bits,
    multiply,
    plus_tile,
    power_of_2,
    tile_blocks,
)


@triton.jit(do_not_specialize_on_alignment=["S"])
def _latent_kernel(
    q_ptr,  # [S * Q, H, L + R], see `triton_absorb`
    cache_ptr, part_ptr, lse_ptr, plan_ptr, table_ptr, query_start_ptr, seq_len_ptr, ancestors_ptr, S,
    CACHE_BLOCK: tl.constexpr, CACHE_POS: tl.constexpr, TABLE_ROW: tl.constexpr,
    SCALE: tl.constexpr,  # of q.k, times log2(e)
    H: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, P: tl.constexpr,
    Q: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TREE: tl.constexpr,  # rows may be nodes of a tree: of their step they see what their bits say
    EMULATED: tl.constexpr,
):  # fmt: skip
    if not EMULATED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # the kernel after this one reads the plan at once
    program = tl.program_id(1)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    query, head = m // H, m % H
    c, r = tl.arange(0, L_PAD), tl.arange(0, R_PAD)
    in_l, in_r = (c < L)[None, :], (r < R)[None, :]
    tile, last, s, _begin, _end, _tokens, _length, _block = first_item(plan_ptr, program)
    before_ptr = plan_ptr + PROGRAMS * RECORD
    while tile < last:
        begin = tl.load(before_ptr + s)
        end = tl.minimum(tl.load(before_ptr + s + 1), last)
        if tile < end:
            first_row = tl.load(query_start_ptr + s)
            queries = tl.load(query_start_ptr + s + 1) - first_row
            length = tl.load(seq_len_ptr + s)
            table_row = table_ptr + s.to(tl.int64) * TABLE_ROW
            cache_block = tile_blocks(table_row, tile - begin, length, P, BLOCK_N)
            valid = (query < queries)[:, None]
            own = (s.to(tl.int64) * Q + query) * H + head
            q_row = q_ptr + (own * (L + R))[:, None]
            q = tl.load(q_row + c[None, :], mask=valid & in_l, other=0.0)
            q_rope = tl.load(q_row + L + r[None, :], mask=valid & in_r, other=0.0)
            bits = load_bits(ancestors_ptr, first_row + query, query < queries, TREE)
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, L_PAD], tl.float32)
            for i in range(tile - begin, end - begin):
                at = i * BLOCK_N + tl.arange(0, BLOCK_N)
                latents, k_rope = load_latents(cache_ptr, cache_block, i, at < length, q.dtype, CACHE_BLOCK, CACHE_POS,
                                               L, L_PAD, R, R_PAD, P, BLOCK_N, EMULATED)  # fmt: skip
                cache_block = tile_blocks(table_row, i + 1, length, P, BLOCK_N)
                scores = multiply(q_rope, tl.trans(k_rope), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), EMULATED)
                scores = multiply(q, tl.trans(latents), scores, EMULATED) * SCALE
                seen = at[None, :] < (length - queries + 1 + query)[:, None]
                if TREE:
                    inner = tl.minimum(tl.maximum(at - length + queries, 0), 63).to(tl.int64)
                    node = (at < length)[None, :] & (((bits[:, None] >> inner[None, :]) & 1) != 0)
                    seen = tl.where((bits < 0)[:, None], seen, (at < length - queries)[None, :] | node)
                scores = tl.where(seen, scores, float("-inf"))
                top, total, acc = plus_tile(scores, latents, top, total, acc, Q > 1, EMULATED)
            part = ((program + s).to(tl.int64) * Q + query) * H + head
            acc = acc / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(part_ptr + (part * L)[:, None] + c[None, :], acc.to(part_ptr.dtype.element_ty), mask=valid & in_l)
            tl.store(lse_ptr + part, top + tl.log2(total), mask=query < queries)
        tile = tl.maximum(tile, end)
        s += 1


def launch_attention(
    absorbed: Tensor, paged: PagedLatents, plan: Tensor, parts: Tensor, lse: Tensor, scale: float, *,
    block_m: int, block_n: int, warps: int, stages: int, PROGRAMS: int, ancestors_T: Tensor | None = None,
    **shares: int,
) -> None:  # fmt: skip
    """Attention in latent space, by parts. shares: how a sequence's tiles are divided, see `triton_absorb`."""
    (_, Q, H, L), (latent_cache, *where) = parts.shape, paged
    launch_triton(
        _latent_kernel, (-(-Q * H // block_m), PROGRAMS),
        absorbed, latent_cache, parts, lse, plan, *where, plan if ancestors_T is None else ancestors_T,
        paged.seq_lens.shape[0], TREE=ancestors_T is not None, SCALE=scale * math.log2(math.e), H=H, PROGRAMS=PROGRAMS,
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages,
        **cache_constants(paged, L, absorbed.shape[2] - L), **shares,
    )  # fmt: skip


def plan_decode(site: CallSite, most: int, queries: int) -> Config:
    """Launch constants for up to ``most`` sequences of up to ``queries`` query tokens. On an H200 three stages were
    faster, but for tiles of 32 rows."""
    q = site.args["q_nope_THN"]
    block_m, wide = min(64, power_of_2(queries * q.shape[1])), q.dtype.itemsize == 4
    return {
        **plan_absorbed(site, most, queries), "programs": site.target.multiprocessors * (2 if block_m == 16 else 1),
        "block_m": block_m, "block_n": 16 if wide else 32, "warps": 4 if block_m < 64 else 8,
        "stages": 2 if wide or block_m == 32 else 3,
    }  # fmt: skip


def decode_configs(site: CallSite) -> list[Config]:
    """The plan for the bucket's largest batch."""
    return [plan_decode(site, site.bucket.hi, site.bucket.query_len)]


@latent_attention.impl("triton_decode", device="cuda", supports=is_absorbed, configs=decode_configs, remedy=problem)
def triton_decode(
    rows: LatentRows, up: UpProjections, paged: PagedLatents, scale: float, ancestors_T: Tensor | None, **config: Any
) -> Tensor:
    """Decode and verification, of trees, too, absorbed."""
    attend = functools.partial(launch_attention, ancestors_T=ancestors_T)
    out_THV = rows.q_nope_THN.new_empty(*rows.q_nope_THN.shape[:2], up.v_up_HVL.shape[1])
    attend_absorbed(attend, rows, up, paged, out_THV, scale, write=True, **config)
    return out_THV
