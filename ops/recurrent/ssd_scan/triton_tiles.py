"""ssd_scan of prompts on a GPU: a program has a sequence's head, keeps its state and goes through tiles of tokens, all
sums of which are products of matrices."""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import launch_triton
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.attention.paged_attention.triton_common import multiply
from graphllm.ops.recurrent.slots import Slots
from graphllm.ops.recurrent.triton_softplus import softplus

AT_ONCE = 8  # sequences; others wait
FEW = 8  # tokens of a sequence that is not worth a tile

_LOG2E = tl.constexpr(1.4426950408889634)
_LEAST = tl.constexpr(-64.0)  # binary logarithm of a token's decay: less is as good as nothing, and costs sums bits


@triton.jit
def _power(v, EMULATED: tl.constexpr):
    """2 ** v. What is below the normal numbers is 0."""
    if EMULATED:
        return tl.exp2(v)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["S"])
def decay_kernel(
    dt_ptr, a_ptr, bias_ptr, sums_ptr, start_ptr, S,
    DT_ROW: tl.constexpr, H: tl.constexpr, BIAS: tl.constexpr, DT_MIN: tl.constexpr, DT_MAX: tl.constexpr,
    FEW: tl.constexpr, TILE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """Of each tile and head two rows, [tiles, H, 2, TILE]: binary logarithms of the decay from the tile's beginning to
    after each token, and the same less that of the step size. Tiles of sequence s begin at query_start_loc[s] // TILE
    + s; of those that are not full, tokens that are not there take no time."""
    gdc_wait_early(EMULATED)
    z = tl.program_id(1)
    before = tl.zeros([BLOCK_S], tl.int32)
    for base in range(0, S, BLOCK_S):
        k = base + tl.arange(0, BLOCK_S)
        before += (tl.load(start_ptr + k, mask=k < S, other=2147483647) // TILE + k <= z).to(tl.int32)
    s = tl.sum(before, axis=0) - 1
    first, end = tl.load(start_ptr + s), tl.load(start_ptr + s + 1)
    begin = first + (z - first // TILE - s) * TILE
    if (begin < end) & (end - first > FEW):
        h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
        q = tl.arange(0, TILE)
        t = begin + q
        inside = (t < end)[:, None] & (h < H)[None, :]
        dt = tl.load(dt_ptr + (t.to(tl.int64) * DT_ROW)[:, None] + h[None, :], mask=inside, other=0).to(tl.float32)
        if BIAS:
            dt += tl.load(bias_ptr + h, mask=h < H, other=0)[None, :]
        dt = tl.maximum(softplus(dt), DT_MIN)
        if DT_MAX > 0:
            dt = tl.minimum(dt, DT_MAX)
        dt = tl.where(inside, dt, 0.0)
        A = tl.load(a_ptr + h, mask=h < H, other=0) * _LOG2E
        sums = tl.cumsum(tl.maximum(dt * A[None, :], _LEAST), 0)
        row = sums_ptr + ((z.to(tl.int64) * H + h) * (2 * TILE))[None, :] + q[:, None]
        tl.store(row, sums, mask=(h < H)[None, :])
        tl.store(row + TILE, sums - tl.log2(tl.maximum(dt, 1e-38)), mask=(h < H)[None, :])


@triton.jit
def _tile(C, B, x, tile, whole, skip, state, SKIP: tl.constexpr, EMULATED: tl.constexpr):
    """A tile's results [TILE, P], and the state [N, P] after it. tile: where its decays are. whole: of all of it."""
    TILE: tl.constexpr = x.shape[0]
    q = tl.arange(0, TILE)
    sums, steps = tl.load(tile + q), tl.load(tile + TILE + q)
    none, apart = tl.zeros(x.shape, tl.float32), tl.zeros([TILE, TILE], tl.float32)
    passed = tl.where(q[:, None] >= q[None, :], sums[:, None] - steps[None, :], float("-inf"))
    seen = multiply(C, tl.trans(B), apart, EMULATED) * _power(passed, EMULATED)
    y = multiply(C, state.to(C.dtype), none, EMULATED) * _power(sums, EMULATED)[:, None]
    y = multiply(seen.to(x.dtype), x, y, EMULATED)
    if SKIP:
        y += skip * x.to(tl.float32)
    left = (x.to(tl.float32) * _power(whole - steps, EMULATED)[:, None]).to(x.dtype)
    return y, multiply(tl.trans(B), left, state * tl.exp2(whole), EMULATED)


@triton.jit(do_not_specialize_on_alignment=["T", "S"])
def tile_kernel(
    x_ptr, b_ptr, c_ptr, d_ptr, sums_ptr, state_ptr, out_ptr, start_ptr, slot_ptr, version_ptr, export_ptr, T, S,
    X_ROW: tl.constexpr, B_ROW: tl.constexpr, C_ROW: tl.constexpr, SLOT: tl.constexpr,
    VERSION: tl.constexpr, VERSIONS: tl.constexpr, H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
    SKIP: tl.constexpr, FEW: tl.constexpr, TILE: tl.constexpr, SEQUENCES: tl.constexpr,
    STAGES: tl.constexpr, EXPORTS: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """A program has every SEQUENCES-th sequence: most of them have one token, and are none of its. Full tiles come by
    the copy engine."""
    gdc_wait_early(EMULATED)
    h = tl.program_id(0)
    p, n, q = tl.arange(0, P), tl.arange(0, N), tl.arange(0, TILE)
    head, group = h * P, (h // (H // G)) * N
    x_tiles = tl.make_tensor_descriptor(x_ptr, [T, H * P], [X_ROW, 1], [TILE, P])
    b_tiles = tl.make_tensor_descriptor(b_ptr, [T, G * N], [B_ROW, 1], [TILE, N])
    c_tiles = tl.make_tensor_descriptor(c_ptr, [T, G * N], [C_ROW, 1], [TILE, N])
    places = head * N + (p * N)[None, :] + n[:, None]
    rows = head + (q * (H * P))[:, None] + p[None, :]
    skip = tl.load(d_ptr + h) if SKIP else 0.0
    for s in range(tl.program_id(1), S, SEQUENCES):
        first, end = tl.load(start_ptr + s), tl.load(start_ptr + 1 + s)
        if end - first > FEW:
            entry = state_ptr + tl.load(slot_ptr + s).to(tl.int64) * SLOT + places
            state = tl.load(entry + tl.load(version_ptr + s) * VERSION).to(tl.float32)
            tile = sums_ptr + ((first // TILE + s).to(tl.int64) * H + h) * (2 * TILE)
            full = (end - first - 1) // TILE if EXPORTS else (end - first) // TILE
            for i in tl.range(0, full, num_stages=STAGES):
                t = first + i * TILE
                C, B, x = c_tiles.load([t, group]), b_tiles.load([t, group]), x_tiles.load([t, head])
                whole = tl.load(tile + TILE - 1)
                y, state = _tile(C, B, x, tile, whole, skip, state, SKIP, EMULATED)
                tl.store(out_ptr + t.to(tl.int64) * (H * P) + rows, y.to(out_ptr.dtype.element_ty))
                tile += H * 2 * TILE
            if first + full * TILE < end:
                if EXPORTS:
                    to = tl.load(export_ptr + s).to(tl.int64)
                    if (to >= 0) & (full > 0):
                        tl.store(state_ptr + to * SLOT + places, state.to(state_ptr.dtype.element_ty))
                t = (first + full * TILE).to(tl.int64)
                here = (t + q < end)[:, None]
                C = tl.load(c_ptr + t * C_ROW + group + (q * C_ROW)[:, None] + n[None, :], mask=here, other=0)
                B = tl.load(b_ptr + t * B_ROW + group + (q * B_ROW)[:, None] + n[None, :], mask=here, other=0)
                x = tl.load(x_ptr + t * X_ROW + head + (q * X_ROW)[:, None] + p[None, :], mask=here, other=0)
                whole = tl.load(tile + TILE - 1)
                y, state = _tile(C, B, x, tile, whole, skip, state, SKIP, EMULATED)
                tl.store(out_ptr + t * (H * P) + rows, y.to(out_ptr.dtype.element_ty), mask=here)
            tl.store(entry + (VERSIONS - 1) * VERSION, state.to(state_ptr.dtype.element_ty))


def launch_decays(
    dt_TH: Tensor, A_H: Tensor, dt_bias_H: Tensor | None, at: Slots, limits: tuple[float, float], tile: int
) -> Tensor:
    """The decays of all tiles of `tile` tokens, see `decay_kernel`."""
    (T, H), S = dt_TH.shape, at.slots.shape[0]
    tiles, heads = T // tile + S, min(16, triton.next_power_of_2(H))
    sums = A_H.new_empty((tiles, H, 2, tile))
    launch_triton(
        decay_kernel, (-(-H // heads), tiles), dt_TH, A_H, A_H if dt_bias_H is None else dt_bias_H, sums,
        at.query_start_loc, S, DT_ROW=dt_TH.stride(0), H=H, BIAS=dt_bias_H is not None, DT_MIN=limits[0],
        DT_MAX=limits[1], FEW=FEW, TILE=tile, BLOCK_H=heads, BLOCK_S=128, EMULATED=triton.knobs.runtime.interpret,
        num_warps=4,
    )  # fmt: skip
    return sums


def launch_tiles(
    x_THP: Tensor,
    B_TGN: Tensor,
    C_TGN: Tensor,
    D_H: Tensor | None,
    sums: Tensor,
    state: Tensor,
    out_THP: Tensor,
    at: Slots,
    exports: Tensor | None,
    *,
    num_warps: int,
    num_stages: int,
) -> None:
    """The kernel for sequences of more than `FEW` tokens."""
    (T, H, P), (_, G, N) = x_THP.shape, B_TGN.shape
    launch_triton(
        tile_kernel, (H, AT_ONCE), x_THP, B_TGN, C_TGN, sums if D_H is None else D_H, sums, state,
        out_THP, *at, at.slots if exports is None else exports, T, at.slots.shape[0], X_ROW=x_THP.stride(0),
        B_ROW=B_TGN.stride(0), C_ROW=C_TGN.stride(0),
        SLOT=state.stride(0), VERSION=state.stride(1), VERSIONS=state.shape[1], H=H, P=P, G=G, N=N,
        SKIP=D_H is not None, FEW=FEW, TILE=sums.shape[3], SEQUENCES=AT_ONCE, STAGES=num_stages,
        EXPORTS=exports is not None, EMULATED=triton.knobs.runtime.interpret, num_warps=num_warps,
    )  # fmt: skip
