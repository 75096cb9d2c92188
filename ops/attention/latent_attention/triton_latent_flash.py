"""The Triton kernel of attention in latent space for sequences of several query tokens that are not expanded
(`triton_write`): few tokens after a long context, trees of drafts in steps with prompts, and what exceeds the chunks.

A program serves a block of query tokens of one sequence, for one head. It brings its queries to latent space, attends
over the latents, and brings the result back; so no length needs any memory.
"""

# mypy: allow-untyped-defs
# ruff: noqa: SIM102  (a branch on a constexpr joins no other condition)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import launch_triton
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.attention.latent_attention.operands import LatentRows, PagedLatents, UpProjections
from graphllm.ops.attention.latent_attention.triton_common import cache_constants, load_latents
from graphllm.ops.attention.paged_attention.triton_common import (
    find_sequence,
    load_bits,
    multiply,
    plus_tile,
    score_constants,
    tile_blocks,
)


@triton.jit
def _attend_tiles(
    acc, top, total, q, q_rope, cache_ptr, table_row, position, end, begin, bits, lo, hi, scale,
    MASKED: tl.constexpr,  # some rows do not see some of these tiles' tokens
    TREE: tl.constexpr,  # rows may be nodes of a tree: from position begin on they see what their bits say
    CACHE_BLOCK: tl.constexpr, CACHE_POS: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr, R: tl.constexpr,
    R_PAD: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    cache_block = tile_blocks(table_row, lo, end, P, BLOCK_N)
    for tile in range(lo, hi):
        at = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        latents, k_rope = load_latents(
            cache_ptr, cache_block, tile, at < end, q.dtype, CACHE_BLOCK, CACHE_POS, L, L_PAD, R, R_PAD, P, BLOCK_N,
            EMULATED,
        )  # fmt: skip
        cache_block = tile_blocks(table_row, tile + 1, end, P, BLOCK_N)
        scores = multiply(q, tl.trans(latents), tl.zeros([q.shape[0], BLOCK_N], tl.float32), EMULATED)
        scores = multiply(q_rope, tl.trans(k_rope), scores, EMULATED) * scale
        if MASKED:
            seen = at[None, :] <= position[:, None]
            if TREE:
                inner = tl.minimum(tl.maximum(at - begin, 0), 63).to(tl.int64)
                node = (at < begin)[None, :] | ((at < end)[None, :] & (((bits[:, None] >> inner[None, :]) & 1) != 0))
                seen = tl.where((bits < 0)[:, None], seen, node)
            scores = tl.where(seen, scores, float("-inf"))
        top, total, acc = plus_tile(scores, latents, top, total, acc, MASKED and TREE, EMULATED)
    return acc, top, total


@triton.jit(do_not_specialize_on_alignment=["S"])
def _latent_flash_kernel(
    q_nope_ptr, q_rope_ptr, k_up_ptr, v_up_ptr, cache_ptr, out_ptr, begins_ptr, table_ptr, query_start_ptr,
    seq_len_ptr, ancestors_ptr, S,
    NOPE_ROW: tl.constexpr, NOPE_HEAD: tl.constexpr, ROPE_ROW: tl.constexpr, ROPE_HEAD: tl.constexpr,
    K_UP_HEAD: tl.constexpr, K_UP_ROW: tl.constexpr, V_UP_HEAD: tl.constexpr, V_UP_ROW: tl.constexpr,
    CACHE_BLOCK: tl.constexpr, CACHE_POS: tl.constexpr, TABLE_ROW: tl.constexpr,
    SCALE: tl.constexpr,  # of q.k, times log2(e)
    FEW: tl.constexpr,  # sequences of no more query tokens are served elsewhere
    TREE: tl.constexpr, H: tl.constexpr, N: tl.constexpr, V: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr,
    R: tl.constexpr, R_PAD: tl.constexpr, P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,  # rows of an up-projection that are multiplied at once
    BLOCK_S: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    gdc_wait_early(EMULATED)
    head = tl.program_id(0) % H
    block = tl.num_programs(0) // H - 1 - tl.program_id(0) // H  # long rows of work first
    s = find_sequence(query_start_ptr, block, S, BLOCK_M, BLOCK_S)
    row0 = tl.load(query_start_ptr + s)
    queries = tl.load(query_start_ptr + s + 1) - row0
    length = tl.load(seq_len_ptr + s)
    skip = (block - row0 // BLOCK_M - s) * BLOCK_M  # query tokens of the sequence before this block
    expanded = tl.load(begins_ptr + s + 1) > tl.load(begins_ptr + s)
    if (queries > FEW) & (skip < queries) & (expanded == 0):
        m, w, c, r = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_W), tl.arange(0, L_PAD), tl.arange(0, R_PAD)
        valid = skip + m < queries
        row = (row0 + skip + m).to(tl.int64)
        rope = q_rope_ptr + (row * ROPE_ROW + head * ROPE_HEAD)[:, None] + r[None, :]
        q_rope = tl.load(rope, mask=valid[:, None] & (r < R)[None, :], other=0.0)
        acc = tl.zeros([BLOCK_M, L_PAD], tl.float32)
        for first in range(0, N, BLOCK_W):
            n = first + w
            nope = q_nope_ptr + (row * NOPE_ROW + head * NOPE_HEAD)[:, None] + n[None, :]
            q_nope = tl.load(nope, mask=valid[:, None] & (n < N)[None, :], other=0.0)
            k_up = k_up_ptr + head * K_UP_HEAD + (n * K_UP_ROW)[:, None] + c[None, :]
            acc = multiply(q_nope, tl.load(k_up, mask=(n < N)[:, None] & (c < L)[None, :], other=0.0), acc, EMULATED)
        q = acc.to(q_rope.dtype)

        begin = length - queries
        position = begin + skip + m
        bits = load_bits(ancestors_ptr, row, valid, TREE)
        low = begin + skip
        end = tl.minimum(low + BLOCK_M, length)  # one past the last position that a row sees
        if TREE:  # nodes may stand anywhere from the first row on, need not see it, and may see later rows
            if tl.load(ancestors_ptr + row0) >= 0:
                low = begin - 1
                end = length
        full = (low + 1) // BLOCK_N  # tiles that end at or before low: seen by all rows
        table_row = table_ptr + s.to(tl.int64) * TABLE_ROW
        acc = tl.zeros([BLOCK_M, L_PAD], tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc, top, total = _attend_tiles(
            acc, top, total, q, q_rope, cache_ptr, table_row, position, end, begin, bits, 0, full, SCALE, False, TREE,
            CACHE_BLOCK, CACHE_POS, L, L_PAD, R, R_PAD, P, BLOCK_N, EMULATED,
        )  # fmt: skip
        acc, top, total = _attend_tiles(
            acc, top, total, q, q_rope, cache_ptr, table_row, position, end, begin, bits, full,
            (end + BLOCK_N - 1) // BLOCK_N, SCALE, True, TREE,
            CACHE_BLOCK, CACHE_POS, L, L_PAD, R, R_PAD, P, BLOCK_N, EMULATED,
        )  # fmt: skip
        mean = (acc / tl.where(total > 0, total, 1.0)[:, None]).to(q.dtype)
        for first in range(0, V, BLOCK_W):
            v = first + w
            v_up = v_up_ptr + head * V_UP_HEAD + (v * V_UP_ROW)[:, None] + c[None, :]
            weights = tl.load(v_up, mask=(v < V)[:, None] & (c < L)[None, :], other=0.0)
            values = multiply(mean, tl.trans(weights), tl.zeros([BLOCK_M, BLOCK_W], tl.float32), EMULATED)
            out = out_ptr + ((row * H + head) * V)[:, None] + v[None, :]
            tl.store(out, values.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (v < V)[None, :])


def latent_flash(
    rows: LatentRows, up: UpProjections, paged: PagedLatents, out_THV: Tensor, begins: Tensor, scale: float,
    ancestors_T: Tensor | None, few: int,
) -> None:  # fmt: skip
    """Attend for the sequences that are not expanded and have more than ``few`` query tokens. begins: as of
    `write_latents`."""
    (T, H, N), (L, R), V = rows.q_nope_THN.shape, (rows.latent_TL.shape[1], rows.k_rope_TR.shape[1]), out_THV.shape[2]
    S, single = paged.seq_lens.shape[0], rows.q_nope_THN.dtype == torch.float32
    block_m = 16 if single else 64
    launch_triton(
        _latent_flash_kernel, ((T // block_m + S) * H,),
        *rows[:2], *up, paged.latent_cache, out_THV, begins, *paged[1:],
        begins if ancestors_T is None else ancestors_T, S,
        NOPE_ROW=rows.q_nope_THN.stride(0), NOPE_HEAD=rows.q_nope_THN.stride(1), ROPE_ROW=rows.q_rope_THR.stride(0),
        ROPE_HEAD=rows.q_rope_THR.stride(1), K_UP_HEAD=up.k_up_HNL.stride(0), K_UP_ROW=up.k_up_HNL.stride(1),
        V_UP_HEAD=up.v_up_HVL.stride(0), V_UP_ROW=up.v_up_HVL.stride(1), SCALE=score_constants(scale, 0.0)[0], FEW=few,
        TREE=ancestors_T is not None, H=H, N=N, V=V, BLOCK_M=block_m, BLOCK_N=16 if single else 32,
        BLOCK_W=16 if single else 32, BLOCK_S=128, num_warps=8, num_stages=1 if single else 2,
        **cache_constants(paged, L, R),
    )  # fmt: skip
