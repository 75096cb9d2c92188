"""What the Triton kernels of latent attention share: tiles of the cache, rows on their way into it, and the sites that
they serve."""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from graphllm.ir import CallSite
from graphllm.ops.attention.latent_attention.operands import PagedLatents
from graphllm.ops.attention.paged_attention.triton_common import as_entries, power_of_2, tile_slots
from graphllm.program.specs import LATENT_GROUP

GROUP = tl.constexpr(LATENT_GROUP)
MOST_E4M3 = tl.constexpr(448.0)


@triton.jit
def rotated_part(cache_ptr, L: tl.constexpr):
    """A pointer to the rotated part of the cache's first row. In 8 bits it is bfloat16: offsets of rows are halved."""
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        end = cache_ptr + (L + 4 * ((L + GROUP - 1) // GROUP))
        return end.to(tl.pointer_type(tl.bfloat16), bitcast=True)
    else:
        return cache_ptr + L


@triton.jit
def load_latents(
    cache_ptr, cache_block, tile, seen, dtype: tl.constexpr,
    CACHE_BLOCK: tl.constexpr, CACHE_POS: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr, R: tl.constexpr,
    R_PAD: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """Latents [BLOCK_N, L_PAD] and rotated parts of keys [BLOCK_N, R_PAD] of a tile's tokens, zeros where ``seen`` is
    not. cache_block: of each token, see `tile_blocks`."""
    c, r = tl.arange(0, L_PAD), tl.arange(0, R_PAD)
    NARROW: tl.constexpr = cache_ptr.dtype.element_ty == tl.float8e4nv
    RATIO: tl.constexpr = 2 if NARROW else 1
    slots = tile_slots(cache_block, tile, CACHE_BLOCK, CACHE_POS, P, BLOCK_N)
    halves = tile_slots(cache_block, tile, CACHE_BLOCK // RATIO, CACHE_POS // RATIO, P, BLOCK_N)
    inside = seen[:, None] if L_PAD == L else seen[:, None] & (c < L)[None, :]
    latents = tl.load(cache_ptr + slots[:, None] + c[None, :], mask=inside, other=0.0)
    rotated = rotated_part(cache_ptr, L) + halves[:, None] + r[None, :]
    k_rope = tl.load(rotated, mask=seen[:, None] & (r < R)[None, :], other=0.0).to(dtype)
    if NARROW:
        WIDTH: tl.constexpr = min(GROUP, L_PAD)
        g = tl.arange(0, L_PAD // WIDTH)
        scales_ptr = (cache_ptr + L).to(tl.pointer_type(tl.float32), bitcast=True)
        quarters = tile_slots(cache_block, tile, CACHE_BLOCK // 4, CACHE_POS // 4, P, BLOCK_N)
        known = seen[:, None] & (g * WIDTH < L)[None, :]
        scales = tl.load(scales_ptr + quarters[:, None] + g[None, :], mask=known, other=0.0)
        numbers = tl.reshape(latents, [BLOCK_N, L_PAD // WIDTH, WIDTH]).to(tl.float32) * scales[:, :, None]
        latents = tl.reshape(numbers, [BLOCK_N, L_PAD])
        return latents if EMULATED else latents.to(dtype), k_rope  # the interpreter would cut, not round
    else:
        return latents, k_rope


@triton.jit
def store_latents(
    latent_ptr, k_rope_ptr, cache_ptr, token, slot, owned,
    LATENT_ROW: tl.constexpr, K_ROPE_ROW: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr, R: tl.constexpr,
    R_PAD: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """Write rows of the step into the cache, rounded to its dtype.

    token: rows of the step, [T] int64.
    slot: offsets of their places in the cache, [T] int64.
    owned: whether a row is to be written, [T].
    """
    r = tl.arange(0, R_PAD)
    inside = owned[:, None] & (r < R)[None, :]
    k_rope = tl.load(k_rope_ptr + (token * K_ROPE_ROW)[:, None] + r[None, :], mask=inside)
    rotated_ptr = rotated_part(cache_ptr, L)
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        WIDTH: tl.constexpr = min(GROUP, L_PAD)
        g = tl.arange(0, L_PAD // WIDTH)
        c = (g * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
        within = owned[:, None, None] & (c < L)[None, :, :]
        latents = tl.load(latent_ptr + (token * LATENT_ROW)[:, None, None] + c[None, :, :], mask=within, other=0.0)
        latents = latents.to(tl.float32)
        steps = tl.div_rn(tl.max(tl.abs(latents), axis=2), MOST_E4M3)
        scales_ptr = (cache_ptr + L).to(tl.pointer_type(tl.float32), bitcast=True)
        known = owned[:, None] & (g * WIDTH < L)[None, :]
        tl.store(scales_ptr + (slot // 4)[:, None] + g[None, :], steps, mask=known)
        divisors = tl.where(steps > 0, steps, 1.0)[:, :, None] + tl.zeros(latents.shape, tl.float32)
        entries = as_entries(latents, divisors, cache_ptr.dtype.element_ty, True, EMULATED)
        tl.store(cache_ptr + slot[:, None, None] + c[None, :, :], entries, mask=within)
        slot = slot // 2
        if EMULATED and k_rope.dtype == tl.float32:  # the interpreter cuts where a GPU rounds
            bits = k_rope.to(tl.int32, bitcast=True)
            k_rope = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    else:
        c = tl.arange(0, L_PAD)
        within = owned[:, None] & (c < L)[None, :]
        latents = tl.load(latent_ptr + (token * LATENT_ROW)[:, None] + c[None, :], mask=within)
        tl.store(cache_ptr + slot[:, None] + c[None, :], latents.to(cache_ptr.dtype.element_ty), mask=within)
    tl.store(rotated_ptr + slot[:, None] + r[None, :], k_rope.to(rotated_ptr.dtype.element_ty), mask=inside)


def cache_constants(paged: PagedLatents, L: int, R: int) -> dict[str, Any]:
    """Constants of kernels that read or write the cache."""
    cache = paged.latent_cache
    return {
        "CACHE_BLOCK": cache.stride(0), "CACHE_POS": cache.stride(1), "TABLE_ROW": paged.block_table.stride(0),
        "L": L, "L_PAD": power_of_2(L), "R": R, "R_PAD": power_of_2(R), "P": cache.shape[1],
        "EMULATED": triton.knobs.runtime.interpret,
    }  # fmt: skip


def problem(site: CallSite) -> str:
    """Why the kernels of this folder do not serve a site, and what a user can do; empty where they do."""
    q, cache, L = site.args["q_nope_THN"], site.args["latent_cache"], site.args["latent_TL"].shape[1]
    P = cache.shape[1]
    if P % 16 or P & (P - 1):
        return f"block_size {P}: no kernel of latent attention for a GPU takes it; use a power of two from 16"
    if L > 512:
        return f"latents of {L}: no kernel for a GPU takes more than 512; use the backend eager"
    if cache.dtype == torch.int8:
        return "kv_cache_dtype int8: no kernel of latent attention for a GPU takes it; use fp8"
    if cache.dtype == torch.float8_e4m3fn and site.target.arch[0] < "sm_89":
        return f"kv_cache_dtype fp8: {site.target.arch[0]} has no such numbers; use auto"
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"dtype {q.dtype}: no kernel of latent attention for a GPU takes it; use bfloat16, float16 or float32"
    others = (site.args[n].dtype for n in ("q_rope_THR", "latent_TL", "k_rope_TR", "k_up_HNL", "v_up_HVL"))
    if cache.dtype not in (q.dtype, torch.float8_e4m3fn) or any(dtype != q.dtype for dtype in others):
        return f"a cache of {cache.dtype} for queries of {q.dtype}: kernels of latent attention take one dtype"
    return ""
