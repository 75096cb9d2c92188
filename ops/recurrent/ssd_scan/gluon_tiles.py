"""ssd_scan of prompts on Hopper, as `triton_tiles` computes it: products run while a program makes what the next ones
need."""

# mypy: allow-untyped-defs

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from graphllm.ir.gluon import GluonKernel
from graphllm.ops.recurrent.slots import Slots
from graphllm.ops.recurrent.ssd_scan.triton_tiles import AT_ONCE, FEW

_load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # until Triton 3.6

TILE = 64  # tokens


@gluon.jit
def _power(v):
    """2 ** v. What is below the normal numbers is 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [v], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def _bring(
    c_tiles, b_tiles, x_tiles, c, b, x, arrived, t, group, head, wanted,
    TILE: gl.constexpr, N: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Ask for the rows of a tile of tokens from t on."""
    mbarrier.expect(arrived, (2 * TILE * N + TILE * P) * 2, pred=wanted)
    for column in gl.static_range(0, N, 64):
        _load_tile(c_tiles, [t, group + column], arrived, c.slice(column, 64, dim=1), pred=wanted)
        _load_tile(b_tiles, [t, group + column], arrived, b.slice(column, 64, dim=1), pred=wanted)
    _load_tile(x_tiles, [t, head], arrived, x, pred=wanted)


@gluon.jit
def _clear(tile, rows, WIDTH: gl.constexpr, TILE: gl.constexpr, wide: gl.constexpr):
    """Zeros from row ``rows`` on: nothing takes them, but 0 * NaN is NaN."""
    q = gl.arange(0, TILE, layout=gl.SliceLayout(1, wide))
    for column in gl.static_range(0, WIDTH, 64):
        part = tile.slice(column, 64, dim=1)
        found = part.load(wide)
        part.store(gl.where((q < rows)[:, None], found, gl.zeros_like(found)))


@gluon.jit
def hopper_tile_kernel(
    x_ptr, b_ptr, c_ptr, d_ptr, sums_ptr, state_ptr, out_ptr, start_ptr, slot_ptr, version_ptr, export_ptr, T, S,
    X_ROW: gl.constexpr, B_ROW: gl.constexpr, C_ROW: gl.constexpr, SLOT: gl.constexpr, VERSION: gl.constexpr,
    VERSIONS: gl.constexpr, H: gl.constexpr, P: gl.constexpr, G: gl.constexpr, N: gl.constexpr, SKIP: gl.constexpr,
    FEW: gl.constexpr, TILE: gl.constexpr, SEQUENCES: gl.constexpr, STAGES: gl.constexpr,
    EXPORTS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    first_factor: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip
    h = gl.program_id(0) % H
    head = h * P
    group = (h // (H // G)) * N
    x_tiles = tma.make_tensor_descriptor(x_ptr, [T, H * P], [X_ROW, 1], [TILE, P], shared)
    b_tiles = tma.make_tensor_descriptor(b_ptr, [T, G * N], [B_ROW, 1], [TILE, 64], shared)
    c_tiles = tma.make_tensor_descriptor(c_ptr, [T, G * N], [C_ROW, 1], [TILE, 64], shared)
    c_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE, N], shared)
    b_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE, N], shared)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE, P], shared)
    left_smem = gl.allocate_shared_memory(dtype, [TILE, P], shared)
    state_smem = gl.allocate_shared_memory(dtype, [N, P], shared)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for k in gl.static_range(STAGES):
        mbarrier.init(full.index(k), count=1)
    hopper.fence_async_shared()
    row = gl.arange(0, TILE, layout=gl.SliceLayout(1, acc))
    column = gl.arange(0, TILE, layout=gl.SliceLayout(0, acc))
    wide_row = gl.arange(0, TILE, layout=gl.SliceLayout(1, wide))
    causal = row[:, None] >= column[None, :]
    n = gl.arange(0, N, layout=gl.SliceLayout(1, acc))
    p = gl.arange(0, P, layout=gl.SliceLayout(0, acc))
    wide_p = gl.arange(0, P, layout=gl.SliceLayout(0, wide))
    places = head * N + (p * N)[None, :] + n[:, None]
    outs = head + (wide_row * (H * P))[:, None] + wide_p[None, :]
    none = gl.zeros([TILE, TILE], gl.float32, acc)
    skip = 0.0
    if SKIP:
        skip = gl.load(d_ptr + h)
    done = 0  # tiles of all sequences
    for s in range(gl.program_id(0) // H, S, SEQUENCES):
        first = gl.load(start_ptr + s)
        end = gl.load(start_ptr + 1 + s)
        if end - first > FEW:
            tiles = (end - first + TILE - 1) // TILE
            for k in gl.static_range(STAGES):
                free = (done + k) % STAGES
                _bring(
                    c_tiles, b_tiles, x_tiles, c_smem.index(free), b_smem.index(free), x_smem.index(free),
                    full.index(free), first + k * TILE, group, head, k < tiles, TILE, N, P,
                )  # fmt: skip
            entry = state_ptr + gl.load(slot_ptr + s).to(gl.int64) * SLOT + places
            state = gl.load(entry + gl.load(version_ptr + s) * VERSION).to(gl.float32)
            state_smem.store(state.to(dtype))
            hopper.fence_async_shared()
            gl.thread_barrier()
            tile = sums_ptr + ((first // TILE + s).to(gl.int64) * H + h) * (2 * TILE)
            sums = gl.load(tile + row)
            steps = gl.load(tile + TILE + column)
            wide_steps = gl.load(tile + TILE + wide_row)
            whole = gl.load(tile + TILE - 1)
            for i in range(tiles):
                t = first + i * TILE
                stage = done % STAGES
                c = c_smem.index(stage)
                b = b_smem.index(stage)
                x = x_smem.index(stage)
                mbarrier.wait(full.index(stage), (done // STAGES) & 1)
                if EXPORTS:  # noqa: SIM102
                    if end - t <= TILE:
                        to = gl.load(export_ptr + s).to(gl.int64)
                        if (to >= 0) & (i > 0):
                            gl.store(state_ptr + to * SLOT + places, state.to(state_ptr.dtype.element_ty))
                if end - t < TILE:
                    _clear(b, end - t, N, TILE, wide)
                    _clear(x, end - t, P, TILE, wide)
                    hopper.fence_async_shared()
                    gl.thread_barrier()
                seen = hopper.warpgroup_mma(c, b.permute((1, 0)), none, use_acc=False, is_async=True)
                y = hopper.warpgroup_mma(c, state_smem, none, use_acc=False, is_async=True)
                left = x.load(wide).to(gl.float32) * _power(whole - wide_steps)[:, None]
                left_smem.store(left.to(dtype))
                hopper.fence_async_shared()
                decay = _power(gl.where(causal, sums[:, None] - steps[None, :], float("-inf")))
                state = state * _power(whole)
                since = _power(sums)
                tile += gl.where(i + 1 < tiles, H * 2 * TILE, 0)  # of the next tile, because loads take long
                sums = gl.load(tile + row)
                steps = gl.load(tile + TILE + column)
                wide_steps = gl.load(tile + TILE + wide_row)
                whole = gl.load(tile + TILE - 1)
                gl.thread_barrier()
                seen = hopper.warpgroup_mma_wait(1, deps=[seen])
                weights = gl.convert_layout((seen * decay).to(dtype), first_factor)
                y = hopper.warpgroup_mma_wait(0, deps=[y])
                y = y * since[:, None]
                y = hopper.warpgroup_mma(weights, x, y, is_async=True)
                state = hopper.warpgroup_mma(b.permute((1, 0)), left_smem, state, is_async=True)
                y = hopper.warpgroup_mma_wait(1, deps=[y])
                if SKIP:
                    y += skip * x.load(acc).to(gl.float32)
                gl.thread_barrier()
                x.store(y.to(dtype))  # in the place of what no product needs any more
                gl.thread_barrier()
                gl.store(out_ptr + t.to(gl.int64) * (H * P) + outs, x.load(wide), mask=(t + wide_row < end)[:, None])
                state = hopper.warpgroup_mma_wait(0, deps=[state])
                state_smem.store(state.to(dtype))
                hopper.fence_async_shared()
                gl.thread_barrier()
                _bring(
                    c_tiles, b_tiles, x_tiles, c, b, x, full.index(stage), t + STAGES * TILE, group, head,
                    i + STAGES < tiles, TILE, N, P,
                )  # fmt: skip
                done += 1
            gl.store(entry + (VERSIONS - 1) * VERSION, state.to(state_ptr.dtype.element_ty))


hopper_tiles = GluonKernel(
    hopper_tile_kernel,
    "(Tensor x, Tensor B, Tensor C, Tensor D, Tensor sums, Tensor(a!) state, Tensor(b!) out, Tensor query_start,"
    " Tensor slots, Tensor versions, Tensor exports, SymInt T, SymInt S) -> ()",
    warps=4,
    early=True,
)


def launch_hopper_tiles(
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
    num_stages: int,
) -> None:
    """The kernel for sequences of more than `FEW` tokens."""
    (T, H, P), (_, G, N) = x_THP.shape, B_TGN.shape
    hopper_tiles(
        H * AT_ONCE, x_THP, B_TGN, C_TGN, sums if D_H is None else D_H, sums, state, out_THP, *at,
        at.slots if exports is None else exports, T, at.slots.shape[0], X_ROW=x_THP.stride(0), B_ROW=B_TGN.stride(0),
        C_ROW=C_TGN.stride(0), SLOT=state.stride(0), VERSION=state.stride(1), VERSIONS=state.shape[1], H=H, P=P, G=G,
        N=N, SKIP=D_H is not None, FEW=FEW, TILE=TILE, SEQUENCES=AT_ONCE, STAGES=num_stages,
        EXPORTS=exports is not None,
    )  # fmt: skip
