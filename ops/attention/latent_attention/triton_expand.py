"""The Triton kernel that makes keys and values of all heads from latents of the cache, a chunk of rows at a time.

Rows of sequences lie one after the other (`triton_write`), a chunk has ``chunk`` of them. Every chunk that there may be
has its launches; those without rows end at once. After the last row come zeros, so that attention may read a tile from
any row on.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import launch_triton
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.attention.latent_attention.operands import LatentRows, PagedLatents, UpProjections
from graphllm.ops.attention.latent_attention.triton_common import GROUP, cache_constants, rotated_part
from graphllm.ops.attention.latent_attention.triton_write import find_sequences
from graphllm.ops.attention.paged_attention.triton_common import multiply, power_of_2

MOST_TILE = 128  # tokens of a tile of attention
_BLOCK_R, _BLOCK_L = 128, 64  # rows of a tile of keys and values, numbers of latents multiplied at once


class Chunk(NamedTuple):
    """Keys and values of a chunk's W rows.

    keys_WHN: the part of keys without positions, [W, H, N].
    k_rope_WR: the rotated part, [W, R].
    values_WHV: [W, H, V].
    begins: int32 [S + 1], the rows where sequences begin, of all chunks.
    """

    keys_WHN: Tensor
    k_rope_WR: Tensor
    values_WHV: Tensor
    begins: Tensor


@triton.jit(do_not_specialize_on_alignment=["S"], do_not_specialize=["start"])
def _expand_kernel(
    cache_ptr, k_up_ptr, v_up_ptr, keys_ptr, k_rope_ptr, values_ptr, begins_ptr, table_ptr, S,
    start,  # the chunk's first row
    K_UP_HEAD: tl.constexpr, K_UP_ROW: tl.constexpr, V_UP_HEAD: tl.constexpr, V_UP_ROW: tl.constexpr,
    CACHE_BLOCK: tl.constexpr, CACHE_POS: tl.constexpr, TABLE_ROW: tl.constexpr,
    CHUNK: tl.constexpr,  # rows of a chunk
    MOST_TILE: tl.constexpr, H: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr, V: tl.constexpr,
    V_PAD: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, P: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_S: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    gdc_wait_early(EMULATED)
    filled = tl.minimum(tl.load(begins_ptr + S) - start, CHUNK)
    tiles = tl.where(filled > 0, (filled + MOST_TILE - 1 + BLOCK_R - 1) // BLOCK_R, 0)
    NARROW: tl.constexpr = cache_ptr.dtype.element_ty == tl.float8e4nv
    dtype: tl.constexpr = keys_ptr.dtype.element_ty
    n, v, r = tl.arange(0, N_PAD), tl.arange(0, V_PAD), tl.arange(0, R_PAD)
    for item in range(tl.program_id(0), tiles * H, tl.num_programs(0)):
        head = item % H
        row = item // H * BLOCK_R + tl.arange(0, BLOCK_R)
        s = find_sequences(begins_ptr, start + row, S, BLOCK_S)
        known = row < filled
        position = start + row - tl.load(begins_ptr + s, mask=known, other=0)
        block = tl.load(table_ptr + s.to(tl.int64) * TABLE_ROW + position // P, mask=known, other=0).to(tl.int64)
        slot = block * CACHE_BLOCK + (position % P) * CACHE_POS
        k_up = k_up_ptr + head * K_UP_HEAD + (n * K_UP_ROW)[:, None]
        v_up = v_up_ptr + head * V_UP_HEAD + (v * V_UP_ROW)[:, None]
        keys = tl.zeros([BLOCK_R, N_PAD], tl.float32)
        values = tl.zeros([BLOCK_R, V_PAD], tl.float32)
        for first in range(0, L, BLOCK_L):
            column = first + tl.arange(0, BLOCK_L)
            inside = (column < L)[None, :]
            latents = tl.load(cache_ptr + slot[:, None] + column[None, :], mask=known[:, None] & inside, other=0.0)
            if NARROW:
                scales_ptr = (cache_ptr + L).to(tl.pointer_type(tl.float32), bitcast=True)
                scales = tl.load(scales_ptr + slot // 4 + first // GROUP, mask=known, other=0.0)
                latents = latents.to(tl.float32) * scales[:, None]
            latents = latents.to(dtype)
            of_keys = tl.load(k_up + column[None, :], mask=(n < N)[:, None] & inside, other=0.0)
            of_values = tl.load(v_up + column[None, :], mask=(v < V)[:, None] & inside, other=0.0)
            keys = multiply(latents, tl.trans(of_keys), keys, EMULATED)
            values = multiply(latents, tl.trans(of_values), values, EMULATED)
        row = row.to(tl.int64)
        within = row < filled + MOST_TILE
        cell = (row * H + head)[:, None]
        tl.store(keys_ptr + cell * N + n[None, :], keys.to(dtype), mask=within[:, None] & (n < N)[None, :])
        tl.store(values_ptr + cell * V + v[None, :], values.to(dtype), mask=within[:, None] & (v < V)[None, :])
        if head == 0:
            of_row = within[:, None] & (r < R)[None, :]
            slots = slot // 2 if NARROW else slot
            k_rope = tl.load(rotated_part(cache_ptr, L) + slots[:, None] + r[None, :], mask=known[:, None] & of_row,
                             other=0.0)  # fmt: skip
            tl.store(k_rope_ptr + (row * R)[:, None] + r[None, :], k_rope.to(dtype), mask=of_row)


def new_chunk(rows: LatentRows, up: UpProjections, begins: Tensor, chunk: int) -> Chunk:
    """Memory for a chunk and the zeros after it."""
    (H, N, _), V, R, W = up.k_up_HNL.shape, up.v_up_HVL.shape[1], rows.k_rope_TR.shape[1], chunk + MOST_TILE
    new = rows.latent_TL.new_empty
    return Chunk(new((W, H, N)), new((W, R)), new((W, H, V)), begins)


def expand(
    to: Chunk, rows: LatentRows, up: UpProjections, paged: PagedLatents, start: int, *, chunk: int, programs: int,
    stages: int,
) -> None:  # fmt: skip
    """Keys and values of the rows from ``start`` on."""
    (H, N, L), V, R = up.k_up_HNL.shape, up.v_up_HVL.shape[1], rows.k_rope_TR.shape[1]
    launch_triton(
        _expand_kernel, (programs,), paged.latent_cache, *up, *to, paged.block_table, paged.seq_lens.shape[0], start,
        K_UP_HEAD=up.k_up_HNL.stride(0), K_UP_ROW=up.k_up_HNL.stride(1), V_UP_HEAD=up.v_up_HVL.stride(0),
        V_UP_ROW=up.v_up_HVL.stride(1), CHUNK=chunk, MOST_TILE=MOST_TILE, H=H, N=N, N_PAD=power_of_2(N), V=V,
        V_PAD=power_of_2(V), BLOCK_R=_BLOCK_R, BLOCK_L=_BLOCK_L, BLOCK_S=128, num_warps=8, num_stages=stages,
        **cache_constants(paged, L, R),
    )  # fmt: skip
