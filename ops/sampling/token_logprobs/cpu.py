"""token_logprobs on the CPU: two passes over a row; the k largest are kept in order while the second goes by."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.kernels import float_kernels
from graphllm.ir.op import CallSite, each_alone
from graphllm.ops.sampling.token_logprobs.op import token_logprobs

_SCHEMA = (
    "(Tensor logits, Tensor tokens, Tensor target, Tensor wanted, Tensor(a!) out, SymInt S, SymInt V, SymInt stride,"
    " SymInt k) -> ()"
)
_kernels = float_kernels("graphllm_token_logprobs", _SCHEMA, Path(__file__).with_name("cpu.cpp"))


def _supports(site: CallSite) -> bool:
    logits, rows = site.args["logits_SV"], [site.args[n] for n in ("tokens_S", "target_S", "wanted_S")]
    return (
        logits.dtype in _kernels
        and logits.stride(-1) == 1
        and all(t.dtype == torch.int32 and t.stride(0) == 1 for t in rows)
    )


@token_logprobs.impl("cpu", device="cpu", supports=_supports, row_order=each_alone)
def cpu_token_logprobs(logits_SV: Tensor, tokens_S: Tensor, target_S: Tensor, wanted_S: Tensor, k: int) -> Tensor:
    """Parallel over rows, and over the vocabulary where rows are few."""
    S, V = logits_SV.shape
    out = logits_SV.new_empty((S, 2 + 2 * k), dtype=torch.float32)
    _kernels[logits_SV.dtype](logits_SV, tokens_S, target_S, wanted_S, out, S, V, logits_SV.stride(0), k)
    return out
