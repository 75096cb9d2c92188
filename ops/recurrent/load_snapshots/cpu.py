"""load_snapshots on the CPU: float32 states."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir import CallSite, CKernel
from graphllm.ops.recurrent.load_snapshots.op import load_snapshots
from graphllm.ops.recurrent.snapshots import are_dense

_kernel = CKernel(
    "graphllm_load_snapshots",
    "(Tensor codes, Tensor scales, Tensor kept, Tensor slots, Tensor snapshots, Tensor(a!) state, Tensor(b!) rest,"
    " SymInt P, SymInt L, SymInt H, SymInt R, SymInt C, SymInt B, SymInt slot_stride, SymInt state_stride,"
    " SymInt rest_slot, SymInt codes_stride, SymInt codes_state, SymInt scales_stride, SymInt scales_state,"
    " SymInt kept_stride) -> ()",
    Path(__file__).with_name("cpu.cpp"),
    usual=False,
)


def _supports(site: CallSite) -> bool:
    return site.args["state"].dtype == torch.float32 and are_dense(site)


@load_snapshots.impl("cpu", device="cpu", supports=_supports)
def cpu_load_snapshots(
    codes: Tensor, scales: Tensor, kept: Tensor, slots: Tensor, snapshots: Tensor, state: Tensor, rest: Tensor
) -> None:
    """Threads share heads and blocks of their columns."""
    _kernel(
        *(codes, scales, kept, slots, snapshots, state, rest),
        *(slots.shape[0], *state.shape[2:], rest.shape[2], state.stride(0), state.stride(2), rest.stride(0)),
        *(*codes.stride()[:2], *scales.stride()[:2], kept.stride(0)),
    )
