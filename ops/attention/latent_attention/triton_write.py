"""The first Triton kernel of steps with prompts: it stores the step's latents in the cache, and says of which sequences
keys and values of all heads are made.

They are made of all tokens of a sequence, in the order of sequences, rows one after the other. A sequence of few query
tokens after others stays in latent space, and so do trees of drafts and what goes beyond the capacity of a step. By
products alone, 171 query tokens of DeepSeek's models would be few. But on an H200 with 16 heads, `triton_latent_flash`
takes 600 us for 100 tokens after 4,096, while keys and values of 8,192 tokens are made in 79 us.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import launch_triton
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.attention.latent_attention.operands import LatentRows, PagedLatents
from graphllm.ops.attention.latent_attention.triton_common import cache_constants, store_latents

_WRITE_TOKENS = 16  # of a program
_LEAST = 16  # query tokens from which on a sequence is expanded


@triton.jit
def find_sequences(begins_ptr, row, S, BLOCK_S: tl.constexpr):
    """The sequence of each row, from the rows [S + 1] where sequences begin; S after the last one's."""
    s = tl.zeros(row.shape, tl.int32)
    for base in range(0, S, BLOCK_S):
        i = base + tl.arange(0, BLOCK_S)
        ends = tl.load(begins_ptr + 1 + i, mask=i < S, other=2147483647)
        s += tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), axis=1)
    return s


@triton.jit
def _plan(
    begins_ptr, query_start_ptr, seq_len_ptr, ancestors_ptr, S,
    LEAST: tl.constexpr, CAPACITY: tl.constexpr, TREE: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Write where each sequence's expanded rows begin; of a sequence that stays in latent space there are none."""
    total, accepted = 0, 0
    tl.store(begins_ptr, 0)
    for base in range(0, S, BLOCK_S):
        s = base + tl.arange(0, BLOCK_S)
        known = s < S
        row = tl.load(query_start_ptr + s, mask=known, other=0)
        queries = tl.load(query_start_ptr + s + 1, mask=known, other=0) - row
        length = tl.load(seq_len_ptr + s, mask=known, other=0)
        expanded = (queries > 1) & ((queries >= LEAST) | (queries == length))
        if TREE:
            expanded = expanded & (tl.load(ancestors_ptr + row, mask=expanded, other=0) < 0)
        ends = total + tl.cumsum(tl.where(expanded, length, 0))
        total = tl.max(ends)
        accepted = tl.maximum(accepted, tl.max(tl.where(ends <= CAPACITY, ends, 0)))
        tl.store(begins_ptr + 1 + s, tl.minimum(ends, accepted), mask=known)


@triton.jit(do_not_specialize_on_alignment=["S"])
def _write_kernel(
    latent_ptr, k_rope_ptr, cache_ptr,
    begins_ptr,  # int32 [S + 1]: rows of keys and values where sequences begin
    table_ptr, query_start_ptr, seq_len_ptr, ancestors_ptr, S,
    LATENT_ROW: tl.constexpr, K_ROPE_ROW: tl.constexpr, CACHE_BLOCK: tl.constexpr, CACHE_POS: tl.constexpr,
    TABLE_ROW: tl.constexpr,
    LEAST: tl.constexpr,  # query tokens from which on a sequence is expanded
    CAPACITY: tl.constexpr,  # most rows of keys and values
    TREE: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, P: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    gdc_wait_early(EMULATED)
    if tl.program_id(0) == 0:
        _plan(begins_ptr, query_start_ptr, seq_len_ptr, ancestors_ptr, S, LEAST, CAPACITY, TREE, BLOCK_S)
    else:
        t = (tl.program_id(0) - 1) * BLOCK_T + tl.arange(0, BLOCK_T)
        s = find_sequences(query_start_ptr, t, S, BLOCK_S)
        owned = s < S  # rows beyond the last sequence are padding
        end = tl.load(query_start_ptr + 1 + s, mask=owned, other=0)
        position = tl.load(seq_len_ptr + s, mask=owned, other=0) - end + t
        block = tl.load(table_ptr + s.to(tl.int64) * TABLE_ROW + position // P, mask=owned, other=0).to(tl.int64)
        slot = block * CACHE_BLOCK + (position % P) * CACHE_POS
        store_latents(latent_ptr, k_rope_ptr, cache_ptr, t.to(tl.int64), slot, owned, LATENT_ROW, K_ROPE_ROW,
                      L, L_PAD, R, R_PAD, EMULATED)  # fmt: skip


def write_latents(rows: LatentRows, paged: PagedLatents, ancestors_T: Tensor | None, capacity: int) -> Tensor:
    """The step's latents go to the cache. Returns int32 [S + 1], the rows of keys and values where sequences begin,
    at most ``capacity`` rows."""
    (T, L), R, S = rows.latent_TL.shape, rows.k_rope_TR.shape[1], paged.seq_lens.shape[0]
    table = paged.block_table
    begins = torch.empty(S + 1, dtype=torch.int32, device=table.device)
    launch_triton(
        _write_kernel, ((T + _WRITE_TOKENS - 1) // _WRITE_TOKENS + 1,),
        rows.latent_TL, rows.k_rope_TR, paged.latent_cache, begins, *paged[1:],
        table if ancestors_T is None else ancestors_T, S, LATENT_ROW=rows.latent_TL.stride(0),
        K_ROPE_ROW=rows.k_rope_TR.stride(0), LEAST=_LEAST,
        CAPACITY=capacity, TREE=ancestors_T is not None, BLOCK_T=_WRITE_TOKENS, BLOCK_S=128, num_warps=4,
        **cache_constants(paged, L, R),
    )  # fmt: skip
    return begins
