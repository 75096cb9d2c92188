"""Triton kernels around attention over chosen rows: what goes to the cache, queries on their way into latent space, and
results on their way out."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import launch_triton
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.attention.index_topk.triton_scores import sequence_of
from graphllm.ops.attention.latent_attention.operands import LatentRows, PagedLatents
from graphllm.ops.attention.latent_attention.triton_common import cache_constants, store_latents
from graphllm.ops.attention.paged_attention.triton_common import multiply, power_of_2


@triton.jit(do_not_specialize_on_alignment=["S"])
def _write_kernel(
    latent_ptr, k_rope_ptr, cache_ptr, chosen_ptr,
    slots_ptr, counts_ptr,  # see `attend_chosen`
    table_ptr, query_start_ptr, seq_len_ptr, S,
    LATENT_ROW: tl.constexpr, K_ROPE_ROW: tl.constexpr, CACHE_BLOCK: tl.constexpr, CACHE_POS: tl.constexpr,
    TABLE_ROW: tl.constexpr, CHOSEN_ROW: tl.constexpr, TOPK: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr,
    R: tl.constexpr, R_PAD: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    """One token: its latent goes to the cache, and its chosen positions become slots of the cache."""
    gdc_wait_early(EMULATED)
    token = tl.program_id(0)
    if token < tl.load(query_start_ptr + S):
        s = sequence_of(query_start_ptr, token, S, BLOCK_S)
        position = tl.load(seq_len_ptr + s) - tl.load(query_start_ptr + s + 1) + token
        table_ptr += s.to(tl.int64) * TABLE_ROW
        row = token.to(tl.int64)
        slot = tl.load(table_ptr + position // P).to(tl.int64) * CACHE_BLOCK + (position % P) * CACHE_POS
        one = tl.arange(0, 1)
        store_latents(latent_ptr, k_rope_ptr, cache_ptr, row + one, slot + one, one == 0, LATENT_ROW, K_ROPE_ROW, L,
                      L_PAD, R, R_PAD, EMULATED)  # fmt: skip
        count = 0
        for base in range(0, TOPK, BLOCK):
            i = base + tl.arange(0, BLOCK)
            chosen = tl.load(chosen_ptr + row * CHOSEN_ROW + i, mask=i < TOPK, other=-1)
            block = tl.load(table_ptr + chosen // P, mask=chosen >= 0, other=0)
            tl.store(slots_ptr + row * TOPK + i, block * P + chosen % P, mask=chosen >= 0)
            count += tl.sum((chosen >= 0).to(tl.int32))
        tl.store(counts_ptr + token, count)


@triton.jit(do_not_specialize_on_alignment=["T"])
def _absorb_kernel(
    q_ptr, k_up_ptr,
    absorbed_ptr,  # [T, H, L]
    T, Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, UP_HEAD: tl.constexpr, UP_ROW: tl.constexpr, H: tl.constexpr,
    N: tl.constexpr, N_PAD: tl.constexpr, L: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
    COLUMNS: tl.constexpr = (L + BLOCK_L - 1) // BLOCK_L
    head = tl.program_id(0) // COLUMNS
    c = tl.program_id(0) % COLUMNS * BLOCK_L + tl.arange(0, BLOCK_L)
    row, n = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, N_PAD)
    up = k_up_ptr + head * UP_HEAD + (n * UP_ROW)[:, None] + c[None, :]
    weights = tl.load(up, mask=(n < N)[:, None] & (c < L)[None, :], other=0.0)
    if not EMULATED:
        tl.extra.cuda.gdc_wait()
    at = q_ptr + (row.to(tl.int64) * Q_ROW + head * Q_HEAD)[:, None] + n[None, :]
    q = tl.load(at, mask=(row < T)[:, None] & (n < N)[None, :], other=0.0)
    absorbed = multiply(q, weights, tl.zeros([BLOCK_M, BLOCK_L], tl.float32), EMULATED)
    to = absorbed_ptr + ((row.to(tl.int64) * H + head) * L)[:, None] + c[None, :]
    tl.store(to, absorbed.to(absorbed_ptr.dtype.element_ty), mask=(row < T)[:, None] & (c < L)[None, :])


@triton.jit(do_not_specialize_on_alignment=["T"])
def _values_kernel(
    part_ptr, lse_ptr,  # see `attend_chosen`
    v_up_ptr, out_ptr, T, UP_HEAD: tl.constexpr, UP_ROW: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    L: tl.constexpr, SHARES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_L: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
    COLUMNS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // COLUMNS
    v = tl.program_id(0) % COLUMNS * BLOCK_V + tl.arange(0, BLOCK_V)
    row, c = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_L)
    if not EMULATED:
        tl.extra.cuda.gdc_wait()
    known = row < T
    cell = row.to(tl.int64) * (SHARES * H) + head
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 1.0, tl.float32)
    if SHARES > 1:
        for share in tl.static_range(SHARES):
            top = tl.maximum(top, tl.load(lse_ptr + cell + share * H, mask=known, other=0.0))
        total = tl.zeros([BLOCK_M], tl.float32)
        for share in tl.static_range(SHARES):
            total += tl.exp2(tl.load(lse_ptr + cell + share * H, mask=known, other=0.0) - top)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for first in range(0, L, BLOCK_L):
        inside = known[:, None] & (first + c < L)[None, :]
        up = v_up_ptr + head * UP_HEAD + (v * UP_ROW)[:, None] + (first + c)[None, :]
        weights = tl.load(up, mask=(v < V)[:, None] & (first + c < L)[None, :], other=0.0)
        if SHARES == 1:
            means = tl.load(part_ptr + (cell * L)[:, None] + (first + c)[None, :], mask=inside, other=0.0)
        else:
            joined = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
            for share in tl.static_range(SHARES):
                at = cell + share * H
                factor = tl.exp2(tl.load(lse_ptr + at, mask=known, other=0.0) - top) / total
                some = inside & (factor > 0)[:, None]  # a share without rows has no numbers
                found = tl.load(part_ptr + (at * L)[:, None] + (first + c)[None, :], mask=some, other=0.0)
                joined += found.to(tl.float32) * factor[:, None]
            means = joined.to(weights.dtype)
        acc = multiply(means, tl.trans(weights), acc, EMULATED)
    out = out_ptr + ((row.to(tl.int64) * H + head) * V)[:, None] + v[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=known[:, None] & (v < V)[None, :])


def write_slots(rows: LatentRows, paged: PagedLatents, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The step's latents go to the cache. Returns chosen slots and their counts, see `attend_chosen`."""
    (T, L), R, topk = rows.latent_TL.shape, rows.k_rope_TR.shape[1], chosen.shape[1]
    slots = torch.empty((T, topk), dtype=torch.int32, device=chosen.device)
    counts = torch.empty((T,), dtype=torch.int32, device=chosen.device)
    launch_triton(
        _write_kernel, (T,), rows.latent_TL, rows.k_rope_TR, paged.latent_cache, chosen, slots, counts, *paged[1:],
        paged.seq_lens.shape[0], LATENT_ROW=rows.latent_TL.stride(0), K_ROPE_ROW=rows.k_rope_TR.stride(0),
        CHOSEN_ROW=chosen.stride(0), TOPK=topk, BLOCK=min(1024, power_of_2(topk)), BLOCK_S=128, num_warps=4,
        **cache_constants(paged, L, R),
    )  # fmt: skip
    return slots, counts


def to_latent(q_nope: Tensor, k_up: Tensor, *, block_m: int, block_l: int) -> Tensor:
    """Queries in latent space, [T, H, L]."""
    (H, N, L), T = k_up.shape, q_nope.shape[0]
    absorbed = q_nope.new_empty(T, H, L)
    launch_triton(
        _absorb_kernel, (H * -(-L // block_l), (T + block_m - 1) // block_m), q_nope, k_up, absorbed, T,
        Q_ROW=q_nope.stride(0), Q_HEAD=q_nope.stride(1), UP_HEAD=k_up.stride(0), UP_ROW=k_up.stride(1), H=H, N=N,
        N_PAD=power_of_2(N), L=L, BLOCK_M=block_m, BLOCK_L=block_l, num_warps=4,
        EMULATED=triton.knobs.runtime.interpret,
    )  # fmt: skip
    return absorbed


def write_values(
    parts: Tensor, lse: Tensor, v_up: Tensor, out_THV: Tensor, *, block_m: int, block_v: int, block_l: int
) -> None:
    """Join the parts of each token and multiply with the values' up-projection."""
    (T, shares, H, L), V = parts.shape, v_up.shape[1]
    launch_triton(
        _values_kernel, (H * -(-V // block_v), (T + block_m - 1) // block_m), parts, lse, v_up, out_THV, T,
        UP_HEAD=v_up.stride(0), UP_ROW=v_up.stride(1), H=H, V=V, L=L, SHARES=shares, BLOCK_M=block_m, BLOCK_V=block_v,
        BLOCK_L=block_l, num_warps=4, num_stages=2, EMULATED=triton.knobs.runtime.interpret,
    )  # fmt: skip
