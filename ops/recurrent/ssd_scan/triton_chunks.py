"""ssd_scan of prompts on a GPU: a program has a sequence's head, keeps its state and goes through tiles of tokens, all
sums of which are products of matrices."""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.attention.paged_attention.triton_common import multiply
from graphllm.ops.recurrent.slots import Slots
from graphllm.ops.recurrent.ssd_scan.cpu import plain
from graphllm.ops.recurrent.ssd_scan.op import ssd_scan
from graphllm.ops.recurrent.ssd_scan.triton_ssd_scan import launch_tokens
from graphllm.ops.recurrent.triton_softplus import softplus

_FEW = 8  # tokens of a sequence that is not worth a tile

_LOG2E = tl.constexpr(1.4426950408889634)
_LEAST = tl.constexpr(-64.0)  # binary logarithm of a token's decay: less is as good as nothing, and costs sums bits


@triton.jit(do_not_specialize_on_alignment=["T"])
def decay_kernel(
    dt_ptr, a_ptr, bias_ptr, sums_ptr, T,
    DT_ROW: tl.constexpr, H: tl.constexpr, BIAS: tl.constexpr, DT_MIN: tl.constexpr, DT_MAX: tl.constexpr,
    TILE: tl.constexpr, BLOCK_H: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """Of each tile of tokens and head two rows, [tiles, H, 2, TILE]: binary logarithms of the decay from the tile's
    beginning to after each token, and the same without that of the step size."""
    gdc_wait_early(EMULATED)
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    q = tl.arange(0, TILE)
    t = tl.program_id(1) * TILE + q
    inside = (t < T)[:, None] & (h < H)[None, :]
    dt = tl.load(dt_ptr + (t.to(tl.int64) * DT_ROW)[:, None] + h[None, :], mask=inside, other=0).to(tl.float32)
    if BIAS:
        dt += tl.load(bias_ptr + h, mask=h < H, other=0)[None, :]
    dt = tl.maximum(softplus(dt), DT_MIN)
    if DT_MAX > 0:
        dt = tl.minimum(dt, DT_MAX)
    A = tl.load(a_ptr + h, mask=h < H, other=0) * _LOG2E
    sums = tl.cumsum(tl.maximum(dt * A[None, :], _LEAST), 0)
    row = sums_ptr + ((tl.program_id(1).to(tl.int64) * H + h) * (2 * TILE))[None, :] + q[:, None]
    tl.store(row, sums, mask=(h < H)[None, :])
    tl.store(row + TILE, sums - tl.log2(dt), mask=(h < H)[None, :])


@triton.jit
def tile_kernel(
    x_ptr, b_ptr, c_ptr, d_ptr, sums_ptr, state_ptr, out_ptr, start_ptr, slot_ptr, version_ptr,
    X_ROW: tl.constexpr, B_ROW: tl.constexpr, C_ROW: tl.constexpr, SLOT: tl.constexpr,
    VERSION: tl.constexpr, VERSIONS: tl.constexpr, H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
    SKIP: tl.constexpr, N_PAD: tl.constexpr, BLOCK_P: tl.constexpr, FEW: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    gdc_wait_early(EMULATED)
    h, s = tl.program_id(1), tl.program_id(2)
    first, end = tl.load(start_ptr + s), tl.load(start_ptr + 1 + s)
    if end - first > FEW:
        p, n, q = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, N_PAD), tl.arange(0, TILE)
        entry = state_ptr + tl.load(slot_ptr + s).to(tl.int64) * SLOT
        places = ((h * P + p) * N)[None, :] + n[:, None]
        inside = (p < P)[None, :] & (n < N)[:, None]
        state = tl.load(entry + tl.load(version_ptr + s) * VERSION + places, mask=inside, other=0).to(tl.float32)
        skip = tl.load(d_ptr + h) if SKIP else 0.0
        head, group = h * P, (h // (H // G)) * N
        sums_ptr += h * (2 * TILE)
        begin = first // TILE * TILE
        tile = sums_ptr + (begin // TILE).to(tl.int64) * (H * 2 * TILE)
        before = tl.load(tile + first - begin - 1, mask=first > begin, other=0)  # the decay of what is not its own
        whole = tl.load(tile + tl.minimum(end - begin, TILE) - 1)
        for done in tl.range(0, end - begin, TILE, num_stages=STAGES):
            base = begin + done
            here = (base + q >= first) & (base + q < end)
            t = base.to(tl.int64)
            given, held = here[:, None] & (n < N)[None, :], here[:, None] & (p < P)[None, :]
            C = tl.load(c_ptr + (t * C_ROW + group) + (q * C_ROW)[:, None] + n[None, :], mask=given, other=0)
            B = tl.load(b_ptr + (t * B_ROW + group) + (q * B_ROW)[:, None] + n[None, :], mask=given, other=0)
            x = tl.load(x_ptr + (t * X_ROW + head) + (q * X_ROW)[:, None] + p[None, :], mask=held, other=0)
            tile = sums_ptr + (base // TILE).to(tl.int64) * (H * 2 * TILE)
            sums = tl.load(tile + q, mask=here, other=0)
            steps = tl.load(tile + TILE + q, mask=here, other=float("inf"))
            following = base + TILE
            last = tl.minimum(end - following, TILE) - 1
            next_whole = tl.load(tile + H * 2 * TILE + last, mask=following < end, other=0)
            none, apart = tl.zeros([TILE, BLOCK_P], tl.float32), tl.zeros([TILE, TILE], tl.float32)
            y = multiply(C, state.to(C.dtype), none, EMULATED) * tl.exp2(sums - before)[:, None]
            passed = tl.where(q[:, None] >= q[None, :], sums[:, None] - steps[None, :], float("-inf"))
            seen = multiply(C, tl.trans(B), apart, EMULATED) * tl.exp2(passed)
            y = multiply(seen.to(x.dtype), x, y, EMULATED)
            if SKIP:
                y += skip * x.to(tl.float32)
            out = out_ptr + (t * (H * P) + head) + (q * (H * P))[:, None] + p[None, :]
            tl.store(out, y.to(out_ptr.dtype.element_ty), mask=held)
            left = (x.to(tl.float32) * tl.exp2(whole - steps)[:, None]).to(x.dtype)
            state = multiply(tl.trans(B), left, state * tl.exp2(whole - before), EMULATED)
            before, whole = 0.0, next_whole
        tl.store(entry + (VERSIONS - 1) * VERSION + places, state.to(state_ptr.dtype.element_ty), mask=inside)


def _supports(site: CallSite) -> bool:
    x_THP, state = site.args["x_THP"], site.args["state"]
    return (
        x_THP.dtype.itemsize == 2 and plain(site) and site.bucket.kind == "mixed" and not site.deterministic
        and state.shape[1] <= _FEW
    )  # fmt: skip


def _configs(site: CallSite) -> list[dict[str, int]]:
    return [{"tile": 64, "block": 64, "num_warps": 4, "num_stages": 2}]


@ssd_scan.impl("triton_tiles", device="cuda", supports=_supports, configs=_configs)
def triton_tiles(
    x_THP: Tensor,
    dt_TH: Tensor,
    A_H: Tensor,
    B_TGN: Tensor,
    C_TGN: Tensor,
    state: Tensor,
    at: Slots,
    D_H: Tensor | None,
    dt_bias_H: Tensor | None,
    dt_min: float,
    dt_max: float,
    *,
    tile: int,
    block: int,
    num_warps: int,
    num_stages: int,
) -> Tensor:
    """Three kernels: decays of all tokens; sequences of few tokens, token by token; the other ones."""
    out_THP = x_THP.new_empty(x_THP.shape)
    (T, H, P), (_, G, N) = x_THP.shape, B_TGN.shape
    tiles = (T + tile - 1) // tile
    sums = A_H.new_empty((tiles, H, 2, tile))
    heads = min(16, triton.next_power_of_2(H))
    launch_triton(
        decay_kernel, (-(-H // heads), tiles), dt_TH, A_H, A_H if dt_bias_H is None else dt_bias_H, sums, T,
        DT_ROW=dt_TH.stride(0), H=H, BIAS=dt_bias_H is not None, DT_MIN=dt_min, DT_MAX=dt_max, TILE=tile,
        BLOCK_H=heads, EMULATED=triton.knobs.runtime.interpret,
    )  # fmt: skip
    launch_tokens(
        *(x_THP, dt_TH, A_H, B_TGN, C_TGN, state, at, D_H, dt_bias_H, (dt_min, dt_max), out_THP),
        most=_FEW, block=32, num_warps=4,
    )  # fmt: skip
    block = min(block, max(16, triton.next_power_of_2(P)))
    launch_triton(
        tile_kernel, (-(-P // block), H, at.slots.shape[0]), x_THP, B_TGN, C_TGN, A_H if D_H is None else D_H, sums,
        state, out_THP, *at, X_ROW=x_THP.stride(0), B_ROW=B_TGN.stride(0), C_ROW=C_TGN.stride(0), SLOT=state.stride(0),
        VERSION=state.stride(1), VERSIONS=state.shape[1], H=H, P=P, G=G, N=N, SKIP=D_H is not None,
        N_PAD=max(16, triton.next_power_of_2(N)), BLOCK_P=block, FEW=_FEW, TILE=tile, STAGES=num_stages,
        EMULATED=triton.knobs.runtime.interpret, num_warps=num_warps,
    )  # fmt: skip
    return out_THP
