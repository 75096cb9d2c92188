"""gated_rms_norm on a GPU: a program has one group of several rows, and reads every number once."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ir.op import each_alone
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.norms.gated_rms_norm.op import gated_rms_norm


@triton.jit(do_not_specialize_on_alignment=["T"])
def gated_norm_kernel(
    x_ptr, gate_ptr, weight_ptr, out_ptr, T, X_ROW: tl.constexpr, GATE_ROW: tl.constexpr, WEIGHT_GROUP: tl.constexpr,
    GROUPS: tl.constexpr, E: tl.constexpr, EPS: tl.constexpr, GATE_FIRST: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """Groups of a row are neighbouring programs. E: numbers of a group. WEIGHT_GROUP: E, or 0 where all groups have one
    weight."""
    gdc_wait_early(EMULATED)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    group = tl.program_id(0) % GROUPS
    t = (tl.program_id(0) // GROUPS * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    e = tl.arange(0, BLOCK)
    inside = (t < T) & (e < E)[None, :]
    at = group * E + e[None, :]
    x = tl.load(x_ptr + t * X_ROW + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + t * GATE_ROW + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + group * WEIGHT_GROUP + e, mask=e < E, other=0.0).to(tl.float32)
    gate = gate / (1.0 + tl.exp(-gate))
    if GATE_FIRST:
        x *= gate
    x = (x * tl.rsqrt(tl.sum(x * x, 1) / E + EPS)[:, None]).to(dtype).to(tl.float32)
    x = (x * weight[None, :]).to(dtype).to(tl.float32)
    if not GATE_FIRST:
        x *= gate
    tl.store(out_ptr + t * (GROUPS * E) + at, x.to(dtype), mask=inside)


def _supports(site: CallSite) -> bool:
    x_TD, gate_TD, weight_E = (site.args[name] for name in ("x_TD", "gate_TD", "weight_E"))
    return (
        x_TD.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and x_TD.dtype == gate_TD.dtype == weight_E.dtype
        and x_TD.stride(1) == gate_TD.stride(1) == weight_E.stride(0) == 1
        and x_TD.shape[1] // site.args["groups"] <= 16_384
    )


def _configs(site: CallSite) -> list[dict[str, int]]:
    """Rows of a group that a program has, and warps: eight numbers a thread, or more."""
    block, most = _block(site.args["x_TD"], site.args["groups"]), triton.next_power_of_2(max(1, site.rows("x_TD")))
    sizes = [(1024, 4), (2048, 8)]
    if site.deterministic:
        most, sizes = 1024, sizes[:1]
    return [
        {"rows": min(most, max(1, numbers // block)), "num_warps": max(warps, block // 512)} for numbers, warps in sizes
    ]


def _block(x_TD: Tensor, groups: int) -> int:
    return triton.next_power_of_2(x_TD.shape[1] // groups)


@gated_rms_norm.impl("triton", device="cuda", supports=_supports, configs=_configs, row_order=each_alone)
def triton_gated_rms_norm(
    x_TD: Tensor,
    gate_TD: Tensor,
    weight_E: Tensor,
    groups: int,
    eps: float,
    gate_first: bool,
    *,
    rows: int,
    num_warps: int,
) -> Tensor:
    """One launch for all groups of all rows."""
    out_TD = x_TD.new_empty(x_TD.shape)
    (T, D), E = x_TD.shape, x_TD.shape[1] // groups
    launch_triton(
        gated_norm_kernel, ((T + rows - 1) // rows * groups,), x_TD, gate_TD, weight_E, out_TD, T,
        X_ROW=x_TD.stride(0), GATE_ROW=gate_TD.stride(0), WEIGHT_GROUP=E if weight_E.shape[0] == D else 0,
        GROUPS=groups, E=E, EPS=eps, GATE_FIRST=gate_first, ROWS=rows, BLOCK=_block(x_TD, groups),
        EMULATED=triton.knobs.runtime.interpret, num_warps=num_warps,
    )  # fmt: skip
    return out_TD
