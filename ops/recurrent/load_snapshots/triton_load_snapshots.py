"""load_snapshots on a GPU: a program writes a tile of one state, or copies words."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ops.recurrent.load_snapshots.op import load_snapshots
from graphllm.ops.recurrent.snapshots import are_dense
from graphllm.ops.recurrent.triton_snapshots import copy_words, programs_of, sizes_of, tile_places


@triton.jit
def _load_kernel(
    codes_ptr, scales_ptr, kept_ptr, slot_ptr, snapshot_ptr, state_ptr, rest_ptr,
    SLOT: tl.constexpr, STATE: tl.constexpr, REST_SLOT: tl.constexpr, CODES: tl.constexpr, CODES_STATE: tl.constexpr,
    SCALES: tl.constexpr, SCALES_STATE: tl.constexpr, KEPT: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, B: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    tile, pair = tl.program_id(0), tl.program_id(1)
    slot, snapshot = tl.load(slot_ptr + pair).to(tl.int64), tl.load(snapshot_ptr + pair).to(tl.int64)
    if snapshot >= 0:
        if tile < TILES:
            number, places, inside, g = tile_places(tile, H, R, C, GROUPS, ROWS)
            codes = tl.load(codes_ptr + (snapshot * CODES + number * CODES_STATE) + places, mask=inside, other=0)
            scale = tl.load(scales_ptr + (snapshot * SCALES + number * SCALES_STATE) + g, mask=g < H * C, other=0)
            x = (codes.to(tl.float32) * scale[None, :]).to(state_ptr.dtype.element_ty)
            tl.store(state_ptr + (slot * SLOT + number * STATE) + places, x, mask=inside)
        else:
            copy_words(kept_ptr + snapshot * KEPT, rest_ptr + slot * REST_SLOT, tile - TILES, B)


def _supports(site: CallSite) -> bool:
    return site.args["state"].dtype in (torch.float32, torch.bfloat16, torch.float16) and are_dense(site)


@load_snapshots.impl("triton", device="cuda", supports=_supports)
def triton_load_snapshots(
    codes: Tensor, scales: Tensor, kept: Tensor, slots: Tensor, snapshots: Tensor, state: Tensor, rest: Tensor
) -> None:
    """One launch for all states of all pairs."""
    sizes = sizes_of(state, rest.shape[2])
    launch_triton(
        _load_kernel, (programs_of(sizes), slots.shape[0]), codes, scales, kept, slots, snapshots, state, rest,
        SLOT=state.stride(0), STATE=state.stride(2), REST_SLOT=rest.stride(0), CODES=codes.stride(0),
        CODES_STATE=codes.stride(1), SCALES=scales.stride(0), SCALES_STATE=scales.stride(1), KEPT=kept.stride(0),
        num_warps=8, **sizes,
    )  # fmt: skip
