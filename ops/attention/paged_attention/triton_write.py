"""The Triton kernel that stores keys and values of a step's tokens in the cache, wherever others attend."""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import launch_triton
from graphllm.ops.attention.paged_attention.operands import Paged, Rotary, Rows
from graphllm.ops.attention.paged_attention.triton_common import (
    as_entries,
    load_rotated,
    load_scales,
    power_of_2,
    rotary_arguments,
)

_WRITE_TOKENS = 32  # tokens for which one program stores keys and values, for one head


@triton.jit(do_not_specialize_on_alignment=["S"])
def _write_kernel(
    k_ptr, v_ptr, cache_ptr, table_ptr, query_start_ptr, seq_len_ptr, k_norm_ptr, cos_ptr, sin_ptr, kv_scales_ptr, S,
    K_ROW: tl.constexpr, K_HEAD: tl.constexpr, V_ROW: tl.constexpr, V_HEAD: tl.constexpr, CACHE_BLOCK: tl.constexpr,
    CACHE_KV: tl.constexpr, CACHE_HEAD: tl.constexpr, CACHE_POS: tl.constexpr, TABLE_ROW: tl.constexpr, E: tl.constexpr,
    E_PAD: tl.constexpr, P: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, F: tl.constexpr,
    NORM: tl.constexpr, EPS: tl.constexpr, SCALED: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    s = tl.zeros([BLOCK_T], tl.int32)
    for base in range(0, S, BLOCK_S):
        i = base + tl.arange(0, BLOCK_S)
        ends = tl.load(query_start_ptr + 1 + i, mask=i < S, other=2147483647)
        s += tl.sum((ends[None, :] <= t[:, None]).to(tl.int32), axis=1)
    owned = s < S  # rows beyond the last sequence are padding
    position = tl.load(seq_len_ptr + s, mask=owned, other=0) - tl.load(query_start_ptr + 1 + s, mask=owned, other=0) + t
    cache_block = tl.load(table_ptr + s.to(tl.int64) * TABLE_ROW + position // P, mask=owned, other=0).to(tl.int64)
    e = tl.arange(0, E_PAD)
    row = t.to(tl.int64)[:, None]
    inside = owned[:, None] & (e < E)[None, :]
    if not EMULATED:
        tl.extra.cuda.gdc_wait()
    k_row = k_ptr + row * K_ROW + head * K_HEAD
    keys = load_rotated(k_row, row, owned[:, None], k_norm_ptr, cos_ptr, sin_ptr, E, E_PAD, F, NORM, EPS)
    values = tl.load(v_ptr + row * V_ROW + head * V_HEAD + e[None, :], mask=inside)
    token = cache_block * CACHE_BLOCK + (position % P) * CACHE_POS
    slots = cache_ptr + token[:, None] + (head * CACHE_HEAD + e)[None, :]
    k_scale, v_scale = load_scales(kv_scales_ptr, SCALED)
    dtype = cache_ptr.dtype.element_ty
    tl.store(slots, as_entries(keys, k_scale, dtype, SCALED, EMULATED), mask=inside)
    tl.store(slots + CACHE_KV, as_entries(values, v_scale, dtype, SCALED, EMULATED), mask=inside)


def head_strides(rows: Rows) -> dict[str, Any]:
    """Constants of kernels that read queries, keys and values."""
    tensors = zip("QKV", rows, strict=True)
    return {f"{n}_{of}": t.stride(i) for n, t in tensors for i, of in enumerate(("ROW", "HEAD"))}


def cache_constants(paged: Paged, E: int, kv_scales: Tensor | None) -> dict[str, Any]:
    """Constants of kernels that find a token's sequence: strides and sizes of the cache."""
    kv_cache = paged.kv_cache
    return {
        "CACHE_BLOCK": kv_cache.stride(0), "CACHE_KV": kv_cache.stride(1), "CACHE_HEAD": kv_cache.stride(2),
        "CACHE_POS": kv_cache.stride(3), "TABLE_ROW": paged.block_table.stride(0), "E": E, "E_PAD": power_of_2(E),
        "P": kv_cache.shape[3], "BLOCK_S": 128, "SCALED": kv_scales is not None,
        "EMULATED": triton.knobs.runtime.interpret,
    }  # fmt: skip


def write_rows(k_TKE: Tensor, v_TKE: Tensor, paged: Paged, kv_scales: Tensor | None, rotary: Rotary | None) -> None:
    """Keys and values of the step's tokens, normalized and rotated, go to the cache."""
    T, K, E = k_TKE.shape
    (_, k_norm, cos, sin), rotation = rotary_arguments(rotary, k_TKE)
    launch_triton(
        _write_kernel, (K, (T + _WRITE_TOKENS - 1) // _WRITE_TOKENS),
        k_TKE, v_TKE, *paged, k_norm, cos, sin, k_TKE if kv_scales is None else kv_scales, paged.seq_lens.shape[0],
        K_ROW=k_TKE.stride(0), K_HEAD=k_TKE.stride(1), V_ROW=v_TKE.stride(0), V_HEAD=v_TKE.stride(1),
        BLOCK_T=_WRITE_TOKENS, num_warps=4, **cache_constants(paged, E, kv_scales), **rotation,
    )  # fmt: skip
