"""Steps with prompts on any GPU, see `prompts`: the Triton kernel of attention over a chunk of keys and values of all
heads.

A program serves a block of query tokens of one sequence, for one head. Rows that have seen tokens of earlier chunks go
on from their output so far and its log-sum-exp: these stand for one key with the logarithm as its score and the output
as its value.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.attention.latent_attention.op import latent_attention
from graphllm.ops.attention.latent_attention.operands import LatentRows, PagedLatents, UpProjections
from graphllm.ops.attention.latent_attention.prompts import attend, is_mixed, step_constants
from graphllm.ops.attention.latent_attention.triton_common import problem
from graphllm.ops.attention.latent_attention.triton_expand import Chunk
from graphllm.ops.attention.paged_attention.triton_common import (
    find_sequence,
    multiply,
    plus_tile,
    power_of_2,
    score_constants,
)


@triton.jit
def _attend_tiles(
    acc, top, total, q_nope, q_rope, keys_ptr, k_rope_ptr, values_ptr, seen, lo, hi, scale,
    MASKED: tl.constexpr,  # some rows do not see some of these tiles' tokens
    H: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, V: tl.constexpr,
    V_PAD: tl.constexpr, BLOCK_N: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    n, r, v = tl.arange(0, N_PAD), tl.arange(0, R_PAD), tl.arange(0, V_PAD)
    for tile in range(lo, hi):
        at = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        keys = tl.load(keys_ptr + (at * (H * N))[:, None] + n[None, :], mask=(n < N)[None, :], other=0.0)
        k_rope = tl.load(k_rope_ptr + (at * R)[:, None] + r[None, :], mask=(r < R)[None, :], other=0.0)
        scores = multiply(q_nope, tl.trans(keys), tl.zeros([q_nope.shape[0], BLOCK_N], tl.float32), EMULATED)
        scores = multiply(q_rope, tl.trans(k_rope), scores, EMULATED) * scale
        if MASKED:
            scores = tl.where(at[None, :] < seen[:, None], scores, float("-inf"))
        values = tl.load(values_ptr + (at * (H * V))[:, None] + v[None, :], mask=(v < V)[None, :], other=0.0)
        top, total, acc = plus_tile(scores, values, top, total, acc, False, EMULATED)
    return acc, top, total


@triton.jit(do_not_specialize_on_alignment=["S"], do_not_specialize=["start"])
def _flash_kernel(
    q_nope_ptr, q_rope_ptr, keys_ptr, k_rope_ptr, values_ptr, begins_ptr, out_ptr,
    lse_ptr,  # float32 [T, H], in units of log2, of rows with tokens in several chunks
    query_start_ptr, seq_len_ptr, S,
    start,  # the chunk's first row
    NOPE_ROW: tl.constexpr, NOPE_HEAD: tl.constexpr, ROPE_ROW: tl.constexpr, ROPE_HEAD: tl.constexpr,
    SCALE: tl.constexpr,  # of q.k, times log2(e)
    CHUNK: tl.constexpr,  # rows of a chunk
    H: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, V: tl.constexpr,
    V_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    gdc_wait_early(EMULATED)
    if tl.load(begins_ptr + S) > start:
        head = tl.program_id(0) % H
        block = tl.num_programs(0) // H - 1 - tl.program_id(0) // H  # long rows of work first
        s = find_sequence(query_start_ptr, block, S, BLOCK_M, BLOCK_S)
        row0 = tl.load(query_start_ptr + s)
        queries = tl.load(query_start_ptr + s + 1) - row0
        length = tl.load(seq_len_ptr + s)
        skip = (block - row0 // BLOCK_M - s) * BLOCK_M  # query tokens of the sequence before this block
        begin = tl.load(begins_ptr + s)
        end = tl.load(begins_ptr + s + 1)
        first = tl.maximum(begin, start)  # the sequence's first row of keys in the chunk
        keys = tl.minimum(end, start + CHUNK) - first
        low = length - queries + skip + begin - first  # the first query's own key, counted from that row
        last = tl.minimum(low + tl.minimum(BLOCK_M, queries - skip), keys)  # keys that some row sees
        if (skip < queries) & (end > begin) & (last > 0):
            m = tl.arange(0, BLOCK_M)
            n, r, v = tl.arange(0, N_PAD), tl.arange(0, R_PAD), tl.arange(0, V_PAD)
            valid = skip + m < queries
            row = (row0 + skip + m).to(tl.int64)
            nope = q_nope_ptr + (row * NOPE_ROW + head * NOPE_HEAD)[:, None] + n[None, :]
            q_nope = tl.load(nope, mask=valid[:, None] & (n < N)[None, :], other=0.0)
            rope = q_rope_ptr + (row * ROPE_ROW + head * ROPE_HEAD)[:, None] + r[None, :]
            q_rope = tl.load(rope, mask=valid[:, None] & (r < R)[None, :], other=0.0)
            out = out_ptr + ((row * H + head) * V)[:, None] + v[None, :]
            inside = valid[:, None] & (v < V)[None, :]
            acc = tl.zeros([BLOCK_M, V_PAD], tl.float32)
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            if begin < start:
                acc = tl.load(out, mask=inside, other=0.0).to(tl.float32)
                top = tl.load(lse_ptr + row * H + head, mask=valid, other=0.0)
                total += 1.0
            at = (first - start).to(tl.int64)
            keys_ptr += (at * H + head) * N
            values_ptr += (at * H + head) * V
            k_rope_ptr += at * R
            seen = tl.minimum(low + m + 1, keys)
            full = tl.maximum(tl.minimum(low + 1, keys), 0) // BLOCK_N
            acc, top, total = _attend_tiles(
                acc, top, total, q_nope, q_rope, keys_ptr, k_rope_ptr, values_ptr, seen, 0, full, SCALE, False,
                H, N, N_PAD, R, R_PAD, V, V_PAD, BLOCK_N, EMULATED,
            )  # fmt: skip
            acc, top, total = _attend_tiles(
                acc, top, total, q_nope, q_rope, keys_ptr, k_rope_ptr, values_ptr, seen, full,
                (last + BLOCK_N - 1) // BLOCK_N, SCALE, True,
                H, N, N_PAD, R, R_PAD, V, V_PAD, BLOCK_N, EMULATED,
            )  # fmt: skip
            tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
            if end > start + CHUNK:
                tl.store(lse_ptr + row * H + head, top + tl.log2(total), mask=valid)


def _flash(
    rows: LatentRows, of: Chunk, paged: PagedLatents, out_THV: Tensor, lse_TH: Tensor, scale: float, start: int, *,
    chunk: int, block_m: int, block_n: int, warps: int, stages: int,
) -> None:  # fmt: skip
    """Attention of the expanded sequences' rows to the keys in the chunk that begins at ``start``."""
    (T, H, N), R, V, S = rows.q_nope_THN.shape, rows.q_rope_THR.shape[2], out_THV.shape[2], paged.seq_lens.shape[0]
    launch_triton(
        _flash_kernel, ((T // block_m + S) * H,),
        *rows[:2], *of, out_THV, lse_TH, *paged[2:], S, start,
        NOPE_ROW=rows.q_nope_THN.stride(0), NOPE_HEAD=rows.q_nope_THN.stride(1), ROPE_ROW=rows.q_rope_THR.stride(0),
        ROPE_HEAD=rows.q_rope_THR.stride(1), SCALE=score_constants(scale, 0.0)[0], CHUNK=chunk, H=H, N=N,
        N_PAD=power_of_2(N), R=R, R_PAD=power_of_2(R), V=V, V_PAD=power_of_2(V), BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_S=128, EMULATED=triton.knobs.runtime.interpret, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _configs(site: CallSite) -> list[dict[str, Any]]:
    """Launch constants, the likely best first."""
    single = site.args["q_nope_THN"].dtype == torch.float32
    tiles = [(16, 16, 4, 2)] if single else [(128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2)]
    return [
        {**step_constants(site), "block_m": block_m, "block_n": block_n, "warps": warps, "stages": stages}
        for block_m, block_n, warps, stages in tiles
    ]


@latent_attention.impl("triton_prefill", device="cuda", supports=is_mixed, configs=_configs, remedy=problem)
def triton_prefill(
    rows: LatentRows, up: UpProjections, paged: PagedLatents, scale: float, ancestors_T: Tensor | None, **config: Any
) -> Tensor:
    """Any ragged batch."""
    return attend(rows, up, paged, scale, ancestors_T, _flash, **config)
