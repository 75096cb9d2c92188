"""ngram_drafts on the CPU: a loop over the sequences."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir.kernels import CKernel
from graphllm.ir.op import CallSite
from graphllm.ops.speculation.ngram_drafts.op import LONGEST_RUN, ngram_drafts

_kernel = CKernel(
    "graphllm_ngram_drafts",
    "(Tensor tokens, Tensor positions, Tensor slots, Tensor newest, Tensor(a!) history, Tensor(b!) drafts,"
    " Tensor(c!) runs, SymInt R, SymInt N, SymInt L, SymInt K, SymInt smallest, SymInt largest, SymInt longest) -> ()",
    Path(__file__).with_name("cpu.cpp"),
)


def whole(site: CallSite) -> bool:
    """Whether the kernels can read the tensors of a site."""
    tensors = [t for t in site.args.values() if isinstance(t, Tensor)]
    return all(t.dtype == torch.int32 and t.is_contiguous() for t in tensors)


@ngram_drafts.impl("cpu", device="cpu", supports=whole)
def cpu_ngram_drafts(
    tokens_R: Tensor, positions_R: Tensor, slots_R: Tensor, newest_R: Tensor, history_NL: Tensor, drafts_NK: Tensor,
    smallest: int, largest: int,
) -> Tensor:  # fmt: skip
    """One thread."""
    runs_R = tokens_R.new_empty(tokens_R.shape)
    sizes = (tokens_R.shape[0], *history_NL.shape, drafts_NK.shape[1])
    rows = (tokens_R, positions_R, slots_R, newest_R)
    _kernel(*rows, history_NL, drafts_NK, runs_R, *sizes, smallest, largest, LONGEST_RUN)
    return runs_R
