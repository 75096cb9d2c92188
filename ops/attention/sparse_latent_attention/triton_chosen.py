"""The Triton kernel of attention over chosen rows, in latent space: decode and prompts alike.

A program has some heads of one token, and a share of its chosen rows. Rows are read one by one from anywhere in the
cache, as keys of L + R numbers, of which the first L are the values, too.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import launch_triton
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.attention.latent_attention.operands import PagedLatents
from graphllm.ops.attention.latent_attention.triton_common import GROUP, cache_constants, rotated_part
from graphllm.ops.attention.paged_attention.triton_common import multiply, plus_tile


@triton.jit
def _load_rows(
    cache_ptr, slot, seen, dtype: tl.constexpr,
    CACHE_BLOCK: tl.constexpr, CACHE_POS: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr, R: tl.constexpr,
    R_PAD: tl.constexpr, P: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """Latents [N, L_PAD] and rotated parts of keys [N, R_PAD] of slots, zeros where ``seen`` is not."""
    c, r = tl.arange(0, L_PAD), tl.arange(0, R_PAD)
    NARROW: tl.constexpr = cache_ptr.dtype.element_ty == tl.float8e4nv
    RATIO: tl.constexpr = 2 if NARROW else 1
    block, place = (slot // P).to(tl.int64), slot % P
    at = block * CACHE_BLOCK + place * CACHE_POS
    inside = seen[:, None] if L_PAD == L else seen[:, None] & (c < L)[None, :]
    latents = tl.load(cache_ptr + at[:, None] + c[None, :], mask=inside, other=0.0)
    halves = block * (CACHE_BLOCK // RATIO) + place * (CACHE_POS // RATIO)
    rotated = rotated_part(cache_ptr, L) + halves[:, None] + r[None, :]
    k_rope = tl.load(rotated, mask=seen[:, None] & (r < R)[None, :], other=0.0).to(dtype)
    if NARROW:
        WIDTH: tl.constexpr = min(GROUP, L_PAD)
        g = tl.arange(0, L_PAD // WIDTH)
        scales_ptr = (cache_ptr + L).to(tl.pointer_type(tl.float32), bitcast=True)
        quarters = block * (CACHE_BLOCK // 4) + place * (CACHE_POS // 4)
        known = seen[:, None] & (g * WIDTH < L)[None, :]
        scales = tl.load(scales_ptr + quarters[:, None] + g[None, :], mask=known, other=0.0)
        numbers = tl.reshape(latents, [slot.shape[0], L_PAD // WIDTH, WIDTH]).to(tl.float32) * scales[:, :, None]
        latents = tl.reshape(numbers, [slot.shape[0], L_PAD])
        return latents if EMULATED else latents.to(dtype), k_rope  # the interpreter would cut, not round
    else:
        return latents, k_rope


@triton.jit(do_not_specialize_on_alignment=["S"])
def _chosen_kernel(
    q_ptr,  # [T, H, L]
    q_rope_ptr, cache_ptr,
    slots_ptr,  # int32 [T, TOPK]: block * P + place in it
    counts_ptr,  # int32 [T]: how many of them there are
    part_ptr,  # [T, SHARES, H, L]
    lse_ptr,  # float32 [T, SHARES, H], in units of log2
    query_start_ptr, S,
    ROPE_ROW: tl.constexpr, ROPE_HEAD: tl.constexpr, CACHE_BLOCK: tl.constexpr, CACHE_POS: tl.constexpr,
    SCALE: tl.constexpr,  # of q.k, times log2(e)
    TOPK: tl.constexpr, SHARES: tl.constexpr, H: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr, R: tl.constexpr,
    R_PAD: tl.constexpr, P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    gdc_wait_early(EMULATED)
    BLOCKS: tl.constexpr = (H + BLOCK_M - 1) // BLOCK_M
    COUNT: tl.constexpr = (TOPK + BLOCK_N - 1) // BLOCK_N
    EACH: tl.constexpr = (COUNT + SHARES - 1) // SHARES
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    if token < tl.load(query_start_ptr + S):
        head = tl.program_id(0) % BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
        share = tl.program_id(1)
        n, c, r = tl.arange(0, BLOCK_N), tl.arange(0, L_PAD), tl.arange(0, R_PAD)
        valid = (head < H)[:, None]
        q_at = q_ptr + ((token * H + head) * L)[:, None] + c[None, :]
        q = tl.load(q_at, mask=valid & (c < L)[None, :], other=0.0)
        rope_at = q_rope_ptr + token * ROPE_ROW + (head * ROPE_HEAD)[:, None] + r[None, :]
        q_rope = tl.load(rope_at, mask=valid & (r < R)[None, :], other=0.0)
        slots_ptr += token * TOPK
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, L_PAD], tl.float32)
        begin = share * (EACH * BLOCK_N)
        end = tl.minimum(begin + EACH * BLOCK_N, tl.load(counts_ptr + token))
        slot = tl.load(slots_ptr + begin + n, mask=begin + n < end, other=-1)
        for first in range(begin, end, BLOCK_N):
            # Slots are read one turn ahead, so that several tiles of rows are on their way.
            seen = slot >= 0
            latents, k_rope = _load_rows(cache_ptr, slot, seen, q.dtype, CACHE_BLOCK, CACHE_POS, L, L_PAD, R, R_PAD, P,
                                         EMULATED)  # fmt: skip
            following = first + BLOCK_N + n
            slot = tl.load(slots_ptr + following, mask=following < end, other=-1)
            scores = multiply(q_rope, tl.trans(k_rope), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), EMULATED)
            scores = multiply(q, tl.trans(latents), scores, EMULATED) * SCALE
            scores = tl.where(seen[None, :], scores, float("-inf"))
            top, total, acc = plus_tile(scores, latents, top, total, acc, False, EMULATED)
        cell = (token * SHARES + share) * H + head
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        to = part_ptr + (cell * L)[:, None] + c[None, :]
        tl.store(to, acc.to(part_ptr.dtype.element_ty), mask=valid & (c < L)[None, :])
        tl.store(lse_ptr + cell, top + tl.log2(total), mask=head < H)


def attend_chosen(
    absorbed: Tensor, q_rope: Tensor, paged: PagedLatents, slots: Tensor, counts: Tensor, parts: Tensor, lse: Tensor,
    scale: float, *, block_m: int, block_n: int, warps: int, stages: int,
) -> None:  # fmt: skip
    """Attention in latent space, by parts.

    absorbed: queries in latent space, [T, H, L].
    slots: chosen rows of the cache, block * P + place in it, int32 [T, K].
    counts: how many of them there are, int32 [T].
    parts: means of latents over each share of a token's rows, [T, shares, H, L].
    lse: the log2 of sums of weights, float32 [T, shares, H]; -inf for a share without rows.
    """
    (T, shares, H, L), R = parts.shape, q_rope.shape[2]
    constants = cache_constants(paged, L, R)
    del constants["TABLE_ROW"]
    launch_triton(
        _chosen_kernel, (T * -(-H // block_m), shares),
        absorbed, q_rope, paged.latent_cache, slots, counts, parts, lse, paged.query_start_loc, paged.seq_lens.shape[0],
        ROPE_ROW=q_rope.stride(0), ROPE_HEAD=q_rope.stride(1), SCALE=scale * math.log2(math.e), TOPK=slots.shape[1],
        SHARES=shares, H=H, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages, **constants,
    )  # fmt: skip
