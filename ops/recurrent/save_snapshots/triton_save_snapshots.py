"""save_snapshots on a GPU: a program rounds a tile of one state, whose numbers stay in registers, or copies words."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ops.recurrent.save_snapshots.op import LEAST_SCALE, MOST_CODE, save_snapshots
from graphllm.ops.recurrent.snapshots import are_dense
from graphllm.ops.recurrent.triton_snapshots import copy_words, programs_of, sizes_of, tile_places


@triton.jit
def _save_kernel(
    state_ptr, rest_ptr, version_ptr, slot_ptr, snapshot_ptr, codes_ptr, scales_ptr, kept_ptr,
    SLOT: tl.constexpr, VERSION: tl.constexpr, STATE: tl.constexpr, REST_SLOT: tl.constexpr,
    REST_VERSION: tl.constexpr, CODES: tl.constexpr, CODES_STATE: tl.constexpr, SCALES: tl.constexpr,
    SCALES_STATE: tl.constexpr, KEPT: tl.constexpr, VERSIONED: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr,
    H: tl.constexpr, R: tl.constexpr, C: tl.constexpr, B: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    tile, pair = tl.program_id(0), tl.program_id(1)
    slot, snapshot = tl.load(slot_ptr + pair).to(tl.int64), tl.load(snapshot_ptr + pair).to(tl.int64)
    if snapshot >= 0:
        version = slot * 0
        if VERSIONED > 0:
            version += tl.load(version_ptr + slot, mask=slot < VERSIONED, other=0)
        if tile < TILES:
            number, places, inside, g = tile_places(tile, H, R, C, GROUPS, ROWS)
            x = tl.load(state_ptr + (slot * SLOT + version * VERSION + number * STATE) + places, mask=inside, other=0)
            x = x.to(tl.float32)
            scale = tl.max(tl.abs(x), 0) / MOST
            scale = tl.where(scale < LEAST, 0.0, scale)
            inverse = tl.where(scale > 0, 1.0 / tl.where(scale > 0, scale, 1.0), 0.0)
            codes = tl.floor(x * inverse[None, :] + 0.5)
            codes = tl.minimum(tl.maximum(codes, -MOST), MOST).to(tl.int8)
            scale += tl.sum(x * 0.0, 0)  # NaN where a number is not finite
            tl.store(codes_ptr + (snapshot * CODES + number * CODES_STATE) + places, codes, mask=inside)
            tl.store(scales_ptr + (snapshot * SCALES + number * SCALES_STATE) + g, scale, mask=g < H * C)
        else:
            words = rest_ptr + slot * REST_SLOT + version * REST_VERSION
            copy_words(words, kept_ptr + snapshot * KEPT, tile - TILES, B)


def _supports(site: CallSite) -> bool:
    return site.args["state"].dtype in (torch.float32, torch.bfloat16, torch.float16) and are_dense(site)


@save_snapshots.impl("triton", device="cuda", supports=_supports)
def triton_save_snapshots(
    state: Tensor,
    rest: Tensor,
    version: Tensor | None,
    slots: Tensor,
    snapshots: Tensor,
    codes: Tensor,
    scales: Tensor,
    kept: Tensor,
) -> None:
    """One launch for all states of all pairs."""
    sizes = sizes_of(state, rest.shape[2])
    launch_triton(
        _save_kernel, (programs_of(sizes), slots.shape[0]),
        state, rest, slots if version is None else version, slots, snapshots, codes, scales, kept,
        SLOT=state.stride(0), VERSION=state.stride(1), STATE=state.stride(2), REST_SLOT=rest.stride(0),
        REST_VERSION=rest.stride(1), CODES=codes.stride(0), CODES_STATE=codes.stride(1), SCALES=scales.stride(0),
        SCALES_STATE=scales.stride(1), KEPT=kept.stride(0), MOST=MOST_CODE,
        VERSIONED=0 if version is None else version.shape[0], LEAST=LEAST_SCALE, num_warps=8, **sizes,
    )  # fmt: skip
