"""What the Triton kernels for fused_moe share: the activation, and the sum over the experts of a token."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.encodings.encoded_weights import BITS
from graphllm.ops.moe.fused_moe.operands import LORA_TABLES, Experts, Residual


@triton.constexpr_function
def has_gate(FIRST, ACTIVATION):
    """Whether rows of a product's weights are of a gate and of up. FIRST: of an expert's products, not the second."""
    return bool(FIRST) and ACTIVATION != "relu2"


@triton.jit
def squared(up):
    """`fused_moe`'s "relu2"."""
    up = tl.maximum(up, 0.0)
    return up * up


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
def pairs_of(experts_ptr, expert, T, A: tl.constexpr, A_PAD: tl.constexpr, BLOCK_T: tl.constexpr):
    """[BLOCK_T]: the pair of each token with an expert, -1 for tokens that have not chosen it."""
    t = tl.arange(0, BLOCK_T)
    a = tl.arange(0, A_PAD)
    choice = t[:, None] * A + a[None, :]
    chosen = tl.load(experts_ptr + choice, mask=(t < T)[:, None] & (a < A)[None, :], other=-1)
    return tl.max(tl.where(chosen == expert, choice, -1), axis=1)


@triton.jit
def pairs_in_slots(pair, rank, start, SLOTS: tl.constexpr):
    """[SLOTS]: the pairs from the start-th on, -1 after the last one. rank: of each pair among those that there are,
    from 1 on."""
    s = tl.arange(0, SLOTS)
    here = (pair >= 0)[:, None] & (rank[:, None] == (start + 1 + s)[None, :])
    return tl.max(tl.where(here, pair[:, None], -1), axis=0)


@triton.jit
def write_pairs(
    acc, pair, block, scale_ptr, out_ptr,
    ROWS: tl.constexpr, FIRST: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """What an expert gave: [BLOCK_N, BLOCK_T], the rows of pairs. Negative ones are none."""
    there = pair >= 0
    if has_gate(FIRST, ACTIVATION):
        halves = tl.permute(tl.reshape(acc, [BLOCK_N // 2, 2, BLOCK_T]), (0, 2, 1))
        gate, up = tl.split(halves)
        out = tl.trans(activated(gate, up, ACTIVATION, LIMIT))
        column = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        width = ROWS // 2
    else:
        if FIRST:
            out = tl.trans(squared(acc))
        else:
            out = tl.trans(acc) * tl.load(scale_ptr + pair, mask=there, other=0.0)[:, None]
        column = block * BLOCK_N + tl.arange(0, BLOCK_N)
        width = ROWS
    inside = there[:, None] & (column < width)[None, :]
    tl.store(out_ptr + pair[:, None] * width + column[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_kernel(
    y_ptr, experts_ptr, residual_ptr, out_ptr, A: tl.constexpr, D: tl.constexpr, RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    gdc_wait_early(EMULATED)
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for a in tl.static_range(A):
        width = tl.where(tl.load(experts_ptr + token * A + a) >= 0, D, 0)  # a branch would end each load first
        total += tl.load(y_ptr + (token * A + a) * D + d, mask=d < width, other=0.0).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual_ptr + token * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * D + d, total.to(out_ptr.dtype.element_ty), mask=d < D)


_ADD_BLOCK = 1024


def added(y_PD: Tensor, experts_TA: Tensor, residual: Residual | None) -> Tensor:
    """[T, D]: the sum of what the experts of each token gave, y_PD [T * A, D], and of the residual if there is one."""
    (T, A), D = experts_TA.shape, y_PD.shape[1]
    out_TD = y_PD.new_empty((T, D))
    launch_triton(
        _add_kernel, (T, -(-D // _ADD_BLOCK)), y_PD, experts_TA,
        y_PD if residual is None else residual.residual_TD, out_TD, A=A, D=D, RESIDUAL=residual is not None,
        BLOCK=_ADD_BLOCK, EMULATED=triton.knobs.runtime.interpret, num_warps=4,
    )  # fmt: skip
    return out_TD


SHARED = 227 * 1024  # bytes of shared memory that the programs on a multiprocessor of sm_90 have


def programs_at_once(site: CallSite, rows: int, tokens: int, inner: int, stages: int) -> int:
    """Programs that fit on a multiprocessor at once, with tiles of ``rows`` rows of weights and ``tokens`` rows of x in
    shared memory, ``inner`` entries of each in every stage."""
    size = site.args["x_TD"].element_size()
    weight = rows * BITS.get(site.args["form"], 8 * size)
    return SHARED // ((weight + tokens * 8 * size) // 8 * inner * stages)


def problem(site: CallSite) -> str:
    """What of the experts' sizes and numbers no kernel for a GPU takes, with what a user can do; empty for none."""
    dtype, sizes = site.args["x_TD"].dtype, site.struct(Experts).sizes[1:]
    if any(n % 8 for n in sizes):
        return f"experts of {sizes[0]} x {sizes[1]}: kernels for a GPU take multiples of 8; use the backend eager"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"dtype {dtype}: no kernel of experts for a GPU takes it; use bfloat16, float16 or float32"
    return ""


def supports(site: CallSite, norm: bool = False) -> bool:
    """Whether the kernels can read the tensors of a site. norm: and normalize their rows."""
    x_TD, experts, residual_TD = site.args["x_TD"], site.struct(Experts), site.args["residual_TD"]
    plain, form = [t for t in experts.biases if t is not None], experts.form
    encoded = [t for t in (*experts.weights, *experts.scales, *experts.zeros) if t is not None]
    tables = [t for name in LORA_TABLES if (t := site.args[name]) is not None]
    halves = (torch.bfloat16, torch.float16) if form else (torch.bfloat16, torch.float16, torch.float32)
    return (
        x_TD.dtype in halves
        and x_TD.stride(-1) == 1
        and all(t.is_contiguous() for t in (*encoded, *plain, *tables))
        and all(t.dtype == x_TD.dtype for t in (*plain, *tables, *(() if form else encoded)))
        and all(n % 8 == 0 for n in experts.sizes[1:])
        and experts.group % (64 if BITS.get(form) == 8 else 32) == 0
        and all(site.args[n].is_contiguous() for n in ("experts_TA", "weights_TA"))
        and (residual_TD is None or residual_TD.is_contiguous())
        and (norm or site.args["norm_D"] is None)
    )
