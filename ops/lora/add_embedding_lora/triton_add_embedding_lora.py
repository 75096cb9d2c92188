"""add_embedding_lora in Triton: a program for each token and some columns, which reads one row of A and B's columns."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.embeddings.embedding.op import round_to
from graphllm.ops.lora.add_embedding_lora.op import add_embedding_lora

_COLUMNS = 256
_RANKS = 16  # rows of B that are read at a time


@triton.jit
def _add_kernel(
    y_ptr, tokens_ptr, a_ptr, b_ptr, ids_ptr, out_ptr, V: tl.constexpr, D: tl.constexpr, RANK: tl.constexpr,
    SCALE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    gdc_wait_early(EMULATED)
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    own_id = tl.load(ids_ptr + t).to(tl.int64)
    rank = tl.where(own_id > 0, RANK, 0)
    token = tl.load(tokens_ptr + t).to(tl.int64)
    total = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, RANK, BLOCK_R):
        j = start + tl.arange(0, BLOCK_R)
        low = tl.load(a_ptr + (own_id * V + token) * RANK + j, mask=j < rank, other=0.0).to(tl.float32)
        inside = (j < rank)[:, None] & (d < D)[None, :]
        b = tl.load(b_ptr + (own_id * RANK + j)[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(low[:, None] * b, axis=0)
    y = tl.load(y_ptr + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * D + d, (y + total * SCALE).to(out_ptr.dtype.element_ty), mask=d < D)


def _supports(site: CallSite) -> bool:
    tensors = [site.args[name] for name in ("y_TD", "a_LVr", "b_LrD")]
    same = len({t.dtype for t in tensors}) == 1 and tensors[0].dtype in (torch.bfloat16, torch.float16, torch.float32)
    return same and all(t.is_contiguous() for t in tensors)


@add_embedding_lora.impl("triton_rows", device="cuda", supports=_supports)
def triton_rows(
    y_TD: Tensor, token_ids_T: Tensor, a_LVr: Tensor, b_LrD: Tensor, adapter_ids_T: Tensor, scale: float = 1.0
) -> Tensor:
    """One launch."""
    (T, D), (_, V, rank) = y_TD.shape, a_LVr.shape
    out_TD = y_TD.new_empty(y_TD.shape)
    launch_triton(
        _add_kernel, (T, -(-D // _COLUMNS)), y_TD, token_ids_T, a_LVr, b_LrD, adapter_ids_T, out_TD, V=V, D=D,
        RANK=rank, SCALE=round_to(scale, y_TD.dtype), BLOCK_R=_RANKS, BLOCK_D=_COLUMNS,
        EMULATED=triton.knobs.runtime.interpret, num_warps=4,
    )  # fmt: skip
    return out_TD
