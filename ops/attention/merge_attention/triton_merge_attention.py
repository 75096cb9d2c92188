"""The Triton kernel of merge_attention: a program merges some heads of one row, all parts at once."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ir.op import each_alone
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.attention.merge_attention.op import merge_attention

_HELD = 8192  # numbers of the parts that a program holds


@triton.jit
def _merge_kernel(
    out_ptr, lse_ptr, merged_ptr, merged_lse_ptr,
    OUT_PART: tl.constexpr, OUT_ROW: tl.constexpr, OUT_HEAD: tl.constexpr, LSE_PART: tl.constexpr,
    LSE_ROW: tl.constexpr, H: tl.constexpr, V: tl.constexpr, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr,
    BLOCK_H: tl.constexpr, V_PAD: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    gdc_wait_early(EMULATED)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    part = tl.arange(0, PARTS_PAD)[:, None].to(tl.int64)
    v = tl.arange(0, V_PAD)
    known = (part < PARTS) & (head < H)[None, :]
    lse = tl.load(lse_ptr + part * LSE_PART + row * LSE_ROW + head[None, :], mask=known, other=float("-inf"))
    top = tl.max(lse, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    shares = tl.exp(lse - shift[None, :])
    total = tl.sum(shares, axis=0)
    at = (part * OUT_PART + row * OUT_ROW + head[None, :] * OUT_HEAD)[:, :, None] + v[None, None, :]
    counts = (shares > 0)[:, :, None] & (v < V)[None, None, :]
    parts = tl.load(out_ptr + at, mask=counts, other=0.0).to(tl.float32)
    merged = tl.sum(parts * shares[:, :, None], axis=0) / tl.where(total > 0, total, 1.0)[:, None]
    cell = row * H + head
    inside = (head < H)[:, None] & (v < V)[None, :]
    tl.store(merged_ptr + (cell * V)[:, None] + v[None, :], merged.to(merged_ptr.dtype.element_ty), mask=inside)
    tl.store(merged_lse_ptr + cell, shift + tl.log(total), mask=head < H)


def _serves(site: CallSite) -> bool:
    out, lse = site.args["out_PTHV"], site.args["lse_PTH"]
    plain = out.dtype in (torch.bfloat16, torch.float16, torch.float32) and lse.dtype == torch.float32
    return plain and isinstance(out.shape[0], int) and 0 < out.shape[0] <= 64 and lse.stride(2) == out.stride(3) == 1


@merge_attention.impl("triton", device="cuda", supports=_serves, row_order=each_alone)
def triton_merge_attention(out_PTHV: Tensor, lse_PTH: Tensor) -> tuple[Tensor, Tensor]:
    """Every row by itself."""
    P, T, H, V = out_PTHV.shape
    merged, merged_lse = out_PTHV.new_empty((T, H, V)), lse_PTH.new_empty((T, H))
    parts, values = triton.next_power_of_2(P), triton.next_power_of_2(V)
    heads = min(triton.next_power_of_2(H), max(1, _HELD // (parts * values)))
    launch_triton(
        _merge_kernel, (T, -(-H // heads)), out_PTHV, lse_PTH, merged, merged_lse,
        OUT_PART=out_PTHV.stride(0), OUT_ROW=out_PTHV.stride(1), OUT_HEAD=out_PTHV.stride(2),
        LSE_PART=lse_PTH.stride(0), LSE_ROW=lse_PTH.stride(1), H=H, V=V, PARTS=P, PARTS_PAD=parts, BLOCK_H=heads,
        V_PAD=values, EMULATED=triton.knobs.runtime.interpret, num_warps=4,
    )  # fmt: skip
    return merged, merged_lse
