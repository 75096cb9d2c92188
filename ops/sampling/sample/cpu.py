"""sample on the CPU: one pass for greedy rows, thresholds by radix select and a mostly log-free race for the others."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.kernels import float_kernels
from graphllm.ir.op import CallSite, each_alone
from graphllm.ops.sampling.sample.op import sample
from graphllm.ops.sampling.sample.operands import Sampling

_SCHEMA = (
    "(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed,"
    " Tensor sample_index, Tensor(a!) out, SymInt S, SymInt V, SymInt stride) -> ()"
)
_kernels = float_kernels("graphllm_sample", _SCHEMA, Path(__file__).with_name("cpu.cpp"))
_PARAMETERS = {
    "temperature_S": torch.float32,
    "top_k_S": torch.int32,
    "top_p_S": torch.float32,
    "min_p_S": torch.float32,
    "seed_S": torch.int64,
    "sample_index_S": torch.int32,
}


def _supports(site: CallSite) -> bool:
    logits = site.args["logits_SV"]
    return (
        logits.dtype in _kernels
        and logits.stride(-1) == 1
        and all(site.args[n].dtype == d and site.args[n].stride(0) == 1 for n, d in _PARAMETERS.items())
    )


@sample.impl("cpu", device="cpu", supports=_supports, row_order=each_alone)
def cpu_sample(logits_SV: Tensor, sampling: Sampling) -> Tensor:
    """Parallel over rows, and over the vocabulary for the maximum of few rows. Never sorts."""
    S, V = logits_SV.shape
    out_S = logits_SV.new_empty(S, dtype=torch.int32)
    _kernels[logits_SV.dtype](logits_SV, *sampling, out_S, S, V, logits_SV.stride(0))
    return out_S
