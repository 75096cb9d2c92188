"""Triton kernel for record_tokens: one program for each row."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ir.op import each_alone
from graphllm.ops.sampling.record_tokens.op import record_tokens


@triton.jit
def _record_kernel(
    tokens_ptr, slot_ptr, kept_slot_ptr, counted_ptr, last_token_ptr, counts_ptr, out_ptr, SCRAP: tl.constexpr,
    COUNTS_ROW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    token = tl.load(tokens_ptr + row)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    tl.store(out_ptr + row, token)
    tl.store(last_token_ptr + slot, tl.maximum(token, 0))
    kept = tl.load(kept_slot_ptr + row).to(tl.int64)
    if (tl.load(counted_ptr + row) > 0) & (token >= 0) & (kept != SCRAP):
        tl.atomic_add(counts_ptr + kept * COUNTS_ROW + token, 1)


def _supports(site: CallSite) -> bool:
    return all(t.dtype == torch.int32 and t.stride(-1) == 1 for t in site.args.values())


@record_tokens.impl("triton_record_tokens", device="cuda", supports=_supports, row_order=each_alone)
def triton_record_tokens(
    tokens_S: Tensor, slot_S: Tensor, kept_slot_S: Tensor, counted_S: Tensor, last_token_N: Tensor, counts_NV: Tensor
) -> Tensor:
    """One launch."""
    S = tokens_S.shape[0]
    out_S = torch.empty(S, dtype=torch.int32, device=tokens_S.device)
    launch_triton(
        _record_kernel, (S,), tokens_S, slot_S, kept_slot_S, counted_S, last_token_N, counts_NV, out_S,
        SCRAP=counts_NV.shape[0] - 1, COUNTS_ROW=counts_NV.stride(0), num_warps=1,
    )  # fmt: skip
    return out_S
