"""rejection_sample on the CPU: as sample, and for rows with a draft one more pass, two where it is refused."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.kernels import float_kernels
from graphllm.ir.op import CallSite
from graphllm.ops.speculation.rejection_sample.op import rejection_sample
from graphllm.ops.speculation.rejection_sample.operands import Proposal, RowSampling

_SCHEMA = (
    "(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, Tensor sample_index,"
    " Tensor drafts, Tensor slots, Tensor place, Tensor? probs, Tensor(a!) out, SymInt S, SymInt V, SymInt K,"
    " SymInt stride, SymInt slot_stride, SymInt place_stride, float threshold, float alpha, float synthetic) -> ()"
)
_kernels = float_kernels("graphllm_rejection_sample", _SCHEMA, Path(__file__).with_name("cpu.cpp"))
_FLOATS, _INTS = (
    ("temperature_R", "top_p_R", "min_p_R"),
    ("top_k_R", "sample_index_R", "drafts_R", "slots_R", "place_R"),
)
_TYPES = dict.fromkeys(_FLOATS, torch.float32) | dict.fromkeys(_INTS, torch.int32) | {"seed_R": torch.int64}


def _supports(site: CallSite) -> bool:
    logits, probs = site.args["logits_RV"], site.args["draft_probs_NKV"]
    return (
        logits.dtype in _kernels
        and logits.stride(-1) == 1
        and (probs is None or (probs.dtype == torch.float32 and probs.stride(-1) == 1))
        and all(site.args[n].dtype == d and site.args[n].stride(0) == 1 for n, d in _TYPES.items())
    )


@rejection_sample.impl("cpu", device="cpu", supports=_supports)
def cpu_rejection_sample(logits_RV: Tensor, sampling: RowSampling, proposal: Proposal) -> Tensor:
    """Parallel over rows, and over the vocabulary for the maximum of few rows. Never sorts."""
    R, V = logits_RV.shape
    out_R = logits_RV.new_empty(R, dtype=torch.int32)
    probs = proposal.draft_probs_NKV
    K, slot, place = (1, 0, 0) if probs is None else (probs.shape[1], probs.stride(0), probs.stride(1))
    _kernels[logits_RV.dtype](
        logits_RV, *sampling, *proposal[:4], out_R, R, V, K, logits_RV.stride(0), slot, place, *proposal[4:]
    )
    return out_R
