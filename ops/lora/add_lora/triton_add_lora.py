"""Triton kernels for add_lora: one for x @ A.T, and one that adds the product with B to y, adapter by adapter, for
linear layers with kernels that do not."""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.lora.add_lora.op import add_lora
from graphllm.ops.lora.add_lora.operands import LowRank
from graphllm.ops.lora.add_lora.triton_low_rank import shrink_tiles

_PARTS = 6  # matrices of a layer that the kernel's arguments have room for
_FEW = 64  # rows up to which the inner dimension is divided among programs
_MOST_RANK = 256  # the largest with a B that fits into registers and shared memory


@triton.jit(do_not_specialize_on_alignment=["T"])
def _expand_kernel(
    y_ptr, low_ptr, b_ptr, ids_ptr, out_ptr, T, y_stride, N: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr, W4: tl.constexpr, W5: tl.constexpr,
    ROWS: tl.constexpr, BR: tl.constexpr, BO: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    # Which columns: a program's lie in one of the layer's matrices.
    block = tl.program_id(1)
    part, start, width = 0, 0, W0
    before, from_block, to_block = 0, 0, 0
    for p in tl.static_range(6):
        own_width = W0 if p == 0 else W1 if p == 1 else W2 if p == 2 else W3 if p == 3 else W4 if p == 4 else W5
        to_block = from_block + (own_width + BO - 1) // BO
        here = (block >= from_block) & (block < to_block)
        part = tl.where(here, p, part)
        start = tl.where(here, before + (block - from_block) * BO, start)
        width = tl.where(here, before + own_width, width)
        before += own_width
        from_block = to_block
    o = start + tl.arange(0, BO)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, BR)
    gdc_wait_early(EMULATED)
    ids = tl.load(ids_ptr + t, mask=t < T, other=0)
    whole = (t < T)[:, None] & (o < width)[None, :]
    total = tl.load(y_ptr + t.to(tl.int64)[:, None] * y_stride + o[None, :], mask=whole, other=0.0).to(tl.float32)
    first = tl.maximum(tl.min(tl.where(ids > 0, ids, 1 << 30), axis=0), 1)
    for own_id in range(first, tl.max(ids, axis=0) + 1):
        own = ids == own_id
        if tl.max(own.to(tl.int32), axis=0) > 0:
            from_low = low_ptr + t.to(tl.int64)[:, None] * R + (part * RANK + j)[None, :]
            low = tl.load(from_low, mask=own[:, None] & (j < RANK)[None, :], other=0.0)
            b = tl.load(
                b_ptr + (own_id * RANK + j).to(tl.int64)[:, None] * N + o[None, :],
                mask=(j < RANK)[:, None] & (o < width)[None, :], other=0.0,
            )  # fmt: skip
            low = low.to(b.dtype)
            if EMULATED:
                low, b = low.to(tl.float32), b.to(tl.float32)
            total = tl.dot(low, b, total, input_precision="ieee")
    tl.store(out_ptr + t.to(tl.int64)[:, None] * N + o[None, :], total.to(out_ptr.dtype.element_ty), mask=whole)


def _supports(site: CallSite) -> bool:
    tensors = [site.args[name] for name in ("y_TO", "x_TI", "a_LRI", "b_LrO")]
    same = len({t.dtype for t in tensors}) == 1 and tensors[0].dtype in (torch.bfloat16, torch.float16, torch.float32)
    dense = all(t.stride(-1) == 1 for t in tensors[:2]) and all(t.is_contiguous() for t in tensors[2:])
    return same and dense and len(site.args["widths"]) <= _PARTS and site.args["b_LrO"].shape[1] <= _MOST_RANK


def _configs(site: CallSite) -> Sequence[Mapping[str, int]]:
    """columns: of a program that multiplies with B. splits: parts of the inner dimension, where rows are few."""
    rows, inner = site.rows("x_TI"), site.args["x_TI"].shape[1]
    if rows > _FEW:
        return [{"rows": n, "columns": c, "splits": 1} for n, c in ((64, 128), (32, 128), (64, 64))]
    few = max(16, triton.next_power_of_2(rows))
    splits = [s for s in (16, 8, 32, 4) if inner // s >= 128] or [1]
    return [{"rows": few, "columns": c, "splits": s} for s in splits[:3] for c in (128, 64)]


@add_lora.impl("triton_grouped", device="cuda", supports=_supports, configs=_configs)
def triton_grouped(y_TO: Tensor, x_TI: Tensor, lora: LowRank, *, rows: int, columns: int, splits: int) -> Tensor:
    """Two launches."""
    a_LRI, b_LrO, adapter_ids_T, widths = lora
    T, N = y_TO.shape
    R, rank = a_LRI.shape[1], b_LrO.shape[1]
    low_TR = torch.empty((T, R), dtype=torch.float32, device=x_TI.device)
    shrink_tiles(x_TI, a_LRI, adapter_ids_T, low_TR, rows, splits)
    out_TO = y_TO.new_empty(y_TO.shape)
    own_rows = min(rows, 64)
    padded = max(16, triton.next_power_of_2(rank))
    columns = columns if padded <= 64 else 64
    places = [*widths, *[0] * (_PARTS - len(widths))]
    launch_triton(
        _expand_kernel, (-(-T // own_rows), sum(-(-w // columns) for w in widths)), y_TO, low_TR, b_LrO, adapter_ids_T,
        out_TO, T, y_TO.stride(0), N=N, R=R, RANK=rank, W0=places[0], W1=places[1], W2=places[2], W3=places[3],
        W4=places[4], W5=places[5], ROWS=own_rows, BR=padded, BO=columns, EMULATED=triton.knobs.runtime.interpret,
        num_warps=4,
    )  # fmt: skip
    return out_TO
