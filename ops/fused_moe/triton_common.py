"""What the Triton kernels for fused_moe share: the activation, and the sum over the experts of a token."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):
    """`fused_moe`'s act(gate) * up."""
    if ACTIVATION == "clamped":
        gate = tl.minimum(gate, LIMIT)
        up = tl.clamp(up, -LIMIT, LIMIT) + 1.0
        scaled = 1.702 * gate
    elif ACTIVATION == "gelu_tanh":
        scaled = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        scaled = gate
    return gate / (1.0 + tl.exp(-scaled)) * up


@triton.jit
def _add_kernel(
    y_ptr, experts_ptr, residual_ptr, out_ptr, A: tl.constexpr, D: tl.constexpr, RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    if not EMULATED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for a in tl.static_range(A):
        if tl.load(experts_ptr + token * A + a) >= 0:
            total += tl.load(y_ptr + (token * A + a) * D + d, mask=d < D, other=0.0).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual_ptr + token * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * D + d, total.to(out_ptr.dtype.element_ty), mask=d < D)


_ADD_BLOCK = 1024


def added(y_PD: Tensor, experts_TA: Tensor, residual_TD: Tensor | None) -> Tensor:
    """[T, D]: the sum of what the experts of each token gave, y_PD [T * A, D], and of the residual if there is one."""
    (T, A), D = experts_TA.shape, y_PD.shape[1]
    out_TD = y_PD.new_empty((T, D))
    launch_triton(
        _add_kernel, (T, -(-D // _ADD_BLOCK)), y_PD, experts_TA,
        y_PD if residual_TD is None else residual_TD, out_TD, A=A, D=D, RESIDUAL=residual_TD is not None,
        BLOCK=_ADD_BLOCK, EMULATED=triton.knobs.runtime.interpret, num_warps=4,
    )  # fmt: skip
    return out_TD


_SHARED = 227 * 1024  # bytes of shared memory that the programs on a multiprocessor of sm_90 have


def programs_at_once(site: CallSite, rows: int, inner: int, stages: int) -> int:
    """Of those that have so many rows of tiles in shared memory, ``inner`` numbers of each in every stage."""
    return _SHARED // (rows * inner * stages * site.args["x_TD"].element_size())


def supports(site: CallSite) -> bool:
    """Whether the kernels can read the tensors of a site."""
    x_TD, rest = site.args["x_TD"], ("gate_up_N2FD", "down_NDF", "gate_up_bias_N2F", "down_bias_ND")
    tensors = [t for n in rest if (t := site.args[n]) is not None]
    return (
        x_TD.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and x_TD.stride(-1) == 1
        and all(t.dtype == x_TD.dtype and t.is_contiguous() for t in tensors)
        and all(site.args["down_NDF"].shape[i] % 8 == 0 for i in (1, 2))
        and site.args["experts_TA"].is_contiguous()
        and site.args["weights_TA"].is_contiguous()
    )
