"""Attention of prompts on Hopper with rows bitwise equal to `triton_range_kernel`'s: the warps, barriers and shared
memory of `gluon_flash`, the tiles, ranges and instructions of that kernel.

Tiles have 64 tokens and are taken from the first to the last. When one begins a range, what the range before gave is
joined, and sums begin anew. Which multiplications and additions are one instruction is said here, where the two
compilers could choose otherwise. A score is the same number whether a group computes it early or late, so the overlap
of `gluon_flash` stays.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from graphllm.ops.attention.paged_attention.gluon_flash import (
    following_scores,
    softmax,
)


@gluon.jit
def store_queries_alike(
    queries, q_ptr, q_norm_ptr, cos_ptr, sin_ptr, row0, left, skip, head, GROUP: gl.constexpr,
    Q_ROW: gl.constexpr, Q_HEAD: gl.constexpr, G: gl.constexpr, E: gl.constexpr, F: gl.constexpr, NORM: gl.constexpr,
    EPS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """A group's query rows into shared memory, as `triton_common.load_rotated` makes them: a row's numbers lie among
    threads as there, so that the sum of their squares has the same order. left: query tokens of the sequence."""
    PART: gl.constexpr = 16 if WINDOW > 0 or E > 128 else 32  # rows at a time, as registers allow
    BLOCK_Q: gl.constexpr = 128 // G
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // E, E // 8], [4, 1], [1, 0])
    e = gl.arange(0, E, layout=gl.SliceLayout(0, layout))
    other = gl.where(e < F, e + F, gl.where(e < 2 * F, e - F, e))
    for i in gl.static_range(0, 64, PART):
        m = GROUP * 64 + i + gl.arange(0, PART, layout=gl.SliceLayout(1, layout))
        token = skip + m // G
        inside = ((m < BLOCK_Q * G) & (token < left))[:, None]
        row = (row0 + token).to(gl.int64)
        at = q_ptr + (row * Q_ROW + (head * G + m % G) * Q_HEAD)[:, None]
        found = gl.load(at + e[None, :], mask=inside, other=0.0)
        if NORM or F > 0:
            x = found.to(gl.float32)
            if NORM:
                scale = gl.rsqrt(gl.sum(x * x, 1) / E + EPS)[:, None]
                weight = gl.load(q_norm_ptr + e).to(gl.float32)[None, :]
                x = ((x * scale).to(found.dtype).to(gl.float32) * weight).to(found.dtype).to(gl.float32)
            if F > 0:
                y = gl.load(at + other[None, :], mask=inside, other=0.0).to(gl.float32)
                if NORM:
                    other_weight = gl.load(q_norm_ptr + other).to(gl.float32)[None, :]
                    y = ((y * scale).to(found.dtype).to(gl.float32) * other_weight).to(found.dtype).to(gl.float32)
                angle = (row * F)[:, None] + gl.where(e < F, e, other)[None, :]
                turned = inside & (e < 2 * F)[None, :]
                cos = gl.load(cos_ptr + angle, mask=turned, other=1.0).to(found.dtype).to(gl.float32)
                sin = gl.load(sin_ptr + angle, mask=turned, other=0.0).to(found.dtype).to(gl.float32)
                x = gl.fma(x, cos, y * gl.where((e < F)[None, :], -sin, sin))
            found = x.to(found.dtype)
        queries.slice(i, PART, dim=0).store(found)
    hopper.fence_async_shared()


@gluon.jit
def join(joined, joined_top, joined_total, acc, top, total, out_layout: gl.constexpr):
    """What ranges gave so far and what the next one gives, as `triton_ranges` joins them."""
    new_top = gl.maximum(joined_top, top)
    shift = gl.where(new_top == float("-inf"), 0.0, new_top)
    kept = gl.exp2(joined_top - shift)
    added = gl.exp2(top - shift)
    kept_rows = gl.convert_layout(kept, gl.SliceLayout(1, out_layout))[:, None]
    added_rows = gl.convert_layout(added, gl.SliceLayout(1, out_layout))[:, None]
    return gl.fma(joined, kept_rows, acc * added_rows), new_top, gl.fma(joined_total, kept, total * added)


@gluon.jit
def attend_range_tiles(
    lo, hi, last, n_tile, weights, acc, top, total, joined, joined_top, joined_total, position, queries, keys, values,
    k_full, k_free, v_full, v_free, turn,
    MASKED: gl.constexpr, WINDOW: gl.constexpr, SCALE: gl.constexpr, BLOCK_N: gl.constexpr, RANGE: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr, GROUP: gl.constexpr, out_layout: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Tiles lo .. hi. ``weights`` are of the tile before, the n_tile-th; its product with values is still to be made,
    and so is the last tile's at the end."""
    for tile in range(lo, hi):
        stage = n_tile % STAGES
        scores, product = following_scores(
            queries, keys, values, weights, acc, k_free, v_full, turn, n_tile, BLOCK_N, STAGES, TURNS, GROUP, layout
        )
        begins = tile % (RANGE // BLOCK_N) == 0
        old_top = top
        old_total = total
        new, top, total, rescale = softmax(
            scores, gl.where(begins, float("-inf"), top), gl.where(begins, 0.0, total), position, tile, MASKED, WINDOW,
            SCALE, BLOCK_N, True, layout,
        )  # fmt: skip
        # The branches of this wait keep ptxas from making the softmax after the product that it is to hide.
        mbarrier.wait(k_full.index((n_tile + 2) % STAGES), ((n_tile + 2) // STAGES) & 1, pred=tile + 1 < last)
        acc, new = hopper.warpgroup_mma_wait(0, deps=[product, new])
        mbarrier.arrive(v_free.index(stage), count=1)
        if begins:
            joined, joined_top, joined_total = join(
                joined, joined_top, joined_total, acc, old_top, old_total, out_layout
            )
            acc = gl.zeros_like(acc)
        else:
            acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, out_layout))[:, None]
        weights = gl.convert_layout(new.to(weights.dtype), weights.type.layout)
        n_tile += 1
    return n_tile, weights, acc, top, total, joined, joined_top, joined_total
