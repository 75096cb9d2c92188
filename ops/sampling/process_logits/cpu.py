"""process_logits on the CPU: one pass over the vocabulary, in chunks that stay in the cache."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.kernels import float_kernels
from graphllm.ir.op import CallSite, each_alone
from graphllm.ops.sampling.process_logits.op import process_logits
from graphllm.ops.sampling.process_logits.operands import Changes, StepDrafts

_SCHEMA = (
    "(Tensor logits, Tensor slot, Tensor mask_row, Tensor mask, Tensor bias_count, Tensor repetition, Tensor frequency,"
    " Tensor presence, Tensor counts, Tensor bias_token, Tensor bias_value, Tensor drafts, Tensor logits_indices,"
    " Tensor place, Tensor? ancestors, Tensor(a!) out, SymInt S, SymInt V,"
    " SymInt logits_stride, SymInt mask_stride, SymInt counts_stride, SymInt token_stride, SymInt value_stride) -> ()"
)
_kernels = float_kernels("graphllm_process_logits", _SCHEMA, Path(__file__).with_name("cpu.cpp"))
_INTS = (
    "slot_S", "mask_row_S", "mask_SW", "bias_count_S", "counts_NV", "bias_token_NB", "drafts_T", "logits_indices_S",
    "place_S",
)  # fmt: skip
_FLOATS = ("repetition_S", "frequency_S", "presence_S", "bias_value_NB")


def _supports(site: CallSite) -> bool:
    args = site.args
    return (
        args["logits_SV"].dtype in _kernels
        and all(args[n].dtype == torch.int32 for n in _INTS)
        and all(args[n].dtype == torch.float32 for n in _FLOATS)
        and all(t.stride(-1) == 1 for t in args.values() if t is not None)
    )


@process_logits.impl("cpu", device="cpu", supports=_supports, row_order=each_alone)
def cpu_process_logits(logits_SV: Tensor, changes: Changes, step: StepDrafts) -> Tensor:
    """Parallel over rows and chunks of the vocabulary."""
    S, V = logits_SV.shape
    out_SV = logits_SV.new_empty((S, V), dtype=torch.float32)
    _kernels[logits_SV.dtype](
        *(logits_SV, *changes, *step, out_SV, S, V, logits_SV.stride(0), changes.mask_SW.stride(0)),
        *(t.stride(0) for t in (changes.counts_NV, changes.bias_token_NB, changes.bias_value_NB)),
    )
    return out_SV
