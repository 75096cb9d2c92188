"""Triton kernel for encoder_attention: flash attention over the step's own keys and values.

A program serves one block of query tokens of one sequence for one query head. The grid has room for one partly filled
block per sequence; a program finds its sequence by comparing with query_start_loc, on the device.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.attention.encoder_attention.op import encoder_attention
from graphllm.ops.attention.paged_attention.triton_common import multiply, power_of_2


@triton.jit
def _attend_tiles(
    acc, top, total, q, k_ptr, v_ptr, at_q, length, lo, hi,
    K_ROW: tl.constexpr, V_ROW: tl.constexpr, SCALE: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
    E: tl.constexpr, E_PAD: tl.constexpr, BLOCK_N: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """Go over tiles lo to hi of a sequence's tokens. MASKED: some rows do not see some of them."""
    e = tl.arange(0, E_PAD)
    for tile in range(lo, hi):
        at = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        wide = at.to(tl.int64)[:, None]
        keys_ptr = k_ptr + wide * K_ROW + e[None, :]
        values_ptr = v_ptr + wide * V_ROW + e[None, :]
        if MASKED:
            inside = (at < length)[:, None] & (e < E)[None, :]
            keys = tl.load(keys_ptr, mask=inside, other=0.0)
        elif E_PAD != E:
            keys = tl.load(keys_ptr, mask=(e < E)[None, :], other=0.0)
        else:
            keys = tl.load(keys_ptr)
        scores = multiply(q, tl.trans(keys), tl.zeros([q.shape[0], BLOCK_N], tl.float32), EMULATED)
        if MASKED:
            seen = (at < length)[None, :]
            if WINDOW > 0:
                apart = at[None, :] - at_q[:, None]
                seen = seen & (apart <= WINDOW) & (apart >= -WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1) * SCALE)
        shift = new_top
        if WINDOW > 0:
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(scores * SCALE - shift[:, None])
        rescale = tl.exp2(top - shift)
        total = total * rescale + tl.sum(p, axis=1)
        acc = acc * rescale[:, None]
        if MASKED:
            values = tl.load(values_ptr, mask=inside, other=0.0)
        elif E_PAD != E:
            values = tl.load(values_ptr, mask=(e < E)[None, :], other=0.0)
        else:
            values = tl.load(values_ptr)
        acc = multiply(p.to(q.dtype), values, acc, EMULATED)
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize_on_alignment=["S"])
def _encoder_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, query_start_ptr, S,
    Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr, V_ROW: tl.constexpr,
    V_HEAD: tl.constexpr,
    SCALE: tl.constexpr,  # of q.k, times log2(e), not negative
    WINDOW: tl.constexpr, H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    gdc_wait_early(EMULATED)
    head = tl.program_id(0) % H
    block = tl.program_id(0) // H
    s = -1
    for base in range(0, S, BLOCK_S):
        i = base + tl.arange(0, BLOCK_S)
        first_block = tl.load(query_start_ptr + i, mask=i < S, other=2147483647) // BLOCK_M + i
        s += tl.sum(((first_block <= block) & (i < S)).to(tl.int32))
    row0 = tl.load(query_start_ptr + s)
    length = tl.load(query_start_ptr + s + 1) - row0
    skip = (block - row0 // BLOCK_M - s) * BLOCK_M  # tokens of the sequence before this block
    if skip < length:
        at_q = skip + tl.arange(0, BLOCK_M)
        e = tl.arange(0, E_PAD)
        inside = (at_q < length)[:, None] & (e < E)[None, :]
        row = (row0 + at_q).to(tl.int64)[:, None]
        q = tl.load(q_ptr + row * Q_ROW + head * Q_HEAD + e[None, :], mask=inside, other=0.0)
        start = row0.to(tl.int64)
        keys_ptr = k_ptr + start * K_ROW + (head // G) * K_HEAD
        values_ptr = v_ptr + start * V_ROW + (head // G) * V_HEAD
        acc = tl.zeros([BLOCK_M, E_PAD], tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if WINDOW > 0:
            first = tl.maximum(skip - WINDOW, 0) // BLOCK_N
            last = (tl.minimum(skip + BLOCK_M + WINDOW, length) + BLOCK_N - 1) // BLOCK_N
            acc, top, total = _attend_tiles(
                acc, top, total, q, keys_ptr, values_ptr, at_q, length, first, last,
                K_ROW, V_ROW, SCALE, WINDOW, True, E, E_PAD, BLOCK_N, EMULATED,
            )  # fmt: skip
        else:
            whole = length // BLOCK_N
            acc, top, total = _attend_tiles(
                acc, top, total, q, keys_ptr, values_ptr, at_q, length, 0, whole,
                K_ROW, V_ROW, SCALE, WINDOW, False, E, E_PAD, BLOCK_N, EMULATED,
            )  # fmt: skip
            acc, top, total = _attend_tiles(
                acc, top, total, q, keys_ptr, values_ptr, at_q, length, whole, (length + BLOCK_N - 1) // BLOCK_N,
                K_ROW, V_ROW, SCALE, WINDOW, True, E, E_PAD, BLOCK_N, EMULATED,
            )  # fmt: skip
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        out = out_ptr + (row * H + head) * E + e[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=inside)


def problem(site: CallSite) -> str:
    """Why the kernel does not serve a site, with what a user can do; empty where it does."""
    q, k, v, starts = (site.args[n] for n in ("q_THE", "k_TKE", "v_TKE", "query_start_loc"))
    if q.shape[2] > 256:
        return f"head_dim {q.shape[2]}: no attention kernel for a GPU takes more than 256; use the backend eager"
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or not q.dtype == k.dtype == v.dtype:
        return f"dtype {q.dtype}: no attention kernel for a GPU takes it; use bfloat16, float16 or float32"
    if starts.dtype != torch.int32 or site.args["scale"] < 0:
        return "attention with starts of another dtype than int32 or a negative scale: use the backend eager"
    return ""


def _configs(site: CallSite) -> list[dict[str, Any]]:
    """Launch constants, the likely best first."""
    q_THE = site.args["q_THE"]
    if q_THE.dtype == torch.float32:
        tiles = [(16, 32, 4, 2), (32, 32, 4, 2)]
    elif q_THE.shape[2] > 128:
        tiles = [(64, 32, 4, 2)]
    else:
        tiles = [(64, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2), (32, 64, 4, 3)]
    return [{"block_m": m, "block_n": n, "warps": warps, "stages": stages} for m, n, warps, stages in tiles]


@encoder_attention.impl(
    "triton", device="cuda", supports=lambda site: not problem(site), configs=_configs, remedy=problem
)
def triton_encoder_attention(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int = 0,
    *,
    block_m: int,
    block_n: int,
    warps: int,
    stages: int,
) -> Tensor:
    """Online softmax over tiles of a sequence, with weights rounded to the dtype."""
    out_THE = torch.empty_like(q_THE, memory_format=torch.contiguous_format)
    T, H, E = q_THE.shape
    S = query_start_loc.shape[0] - 1
    launch_triton(
        _encoder_kernel, ((T // block_m + S) * H,),
        q_THE, k_TKE, v_TKE, out_THE, query_start_loc, S,
        Q_ROW=q_THE.stride(0), Q_HEAD=q_THE.stride(1), K_ROW=k_TKE.stride(0), K_HEAD=k_TKE.stride(1),
        V_ROW=v_TKE.stride(0), V_HEAD=v_TKE.stride(1), SCALE=scale * math.log2(math.e), WINDOW=window, H=H,
        G=H // k_TKE.shape[1], E=E, E_PAD=power_of_2(E), BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_S=128,
        EMULATED=triton.knobs.runtime.interpret, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out_THE
