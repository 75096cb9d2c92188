"""save_snapshots on the CPU: float32 states."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from graphllm.ir import CallSite, CKernel
from graphllm.ops.recurrent.save_snapshots.op import save_snapshots
from graphllm.ops.recurrent.snapshots import are_dense

_kernel = CKernel(
    "graphllm_save_snapshots",
    "(Tensor state, Tensor rest, Tensor? version, Tensor slots, Tensor snapshots, Tensor(a!) codes, Tensor(b!) scales,"
    " Tensor(c!) kept, SymInt P, SymInt L, SymInt H, SymInt R, SymInt C, SymInt B, SymInt slot_stride,"
    " SymInt version_stride, SymInt state_stride, SymInt rest_slot, SymInt rest_version, SymInt codes_stride,"
    " SymInt codes_state, SymInt scales_stride, SymInt scales_state, SymInt kept_stride, SymInt versioned) -> ()",
    Path(__file__).with_name("cpu.cpp"),
    usual=False,
)


def _supports(site: CallSite) -> bool:
    return site.args["state"].dtype == torch.float32 and are_dense(site)


@save_snapshots.impl("cpu", device="cpu", supports=_supports)
def cpu_save_snapshots(
    state: Tensor,
    rest: Tensor,
    version: Tensor | None,
    slots: Tensor,
    snapshots: Tensor,
    codes: Tensor,
    scales: Tensor,
    kept: Tensor,
) -> None:
    """Threads share heads and blocks of their columns."""
    _kernel(
        *(state, rest, version, slots, snapshots, codes, scales, kept),
        *(slots.shape[0], *state.shape[2:], rest.shape[2], *state.stride()[:3], *rest.stride()[:2]),
        *(*codes.stride()[:2], *scales.stride()[:2], kept.stride(0), 0 if version is None else version.shape[0]),
    )
