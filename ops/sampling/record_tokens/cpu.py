"""record_tokens on the CPU: a loop over the rows."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.kernels import CKernel
from graphllm.ir.op import CallSite, each_alone
from graphllm.ops.sampling.record_tokens.op import record_tokens

_kernel = CKernel(
    "graphllm_record_tokens",
    "(Tensor tokens, Tensor slot, Tensor kept_slot, Tensor counted, Tensor(a!) last_token, Tensor(b!) counts,"
    " Tensor(c!) out, SymInt S, SymInt N, SymInt counts_stride) -> ()",
    Path(__file__).with_name("cpu.cpp"),
)


def _supports(site: CallSite) -> bool:
    return all(t.dtype == torch.int32 and t.stride(-1) == 1 for t in site.args.values())


@record_tokens.impl("cpu", device="cpu", supports=_supports, row_order=each_alone)
def cpu_record_tokens(
    tokens_S: Tensor, slot_S: Tensor, kept_slot_S: Tensor, counted_S: Tensor, last_token_N: Tensor, counts_NV: Tensor
) -> Tensor:
    """One thread."""
    out_S = tokens_S.new_empty(tokens_S.shape)
    rows = (tokens_S, slot_S, kept_slot_S, counted_S)
    _kernel(*rows, last_token_N, counts_NV, out_S, tokens_S.shape[0], counts_NV.shape[0], counts_NV.stride(0))
    return out_S
