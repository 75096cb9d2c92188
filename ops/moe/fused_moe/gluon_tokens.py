"""fused_moe on Hopper for some tokens and experts in four-bit floats with powers of two for 32: a small kernel brings
the rows of tokens into the order of experts, and each of the two products is one launch of `gluon_experts`."""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton, runs_gluon
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.moe.fused_moe.gluon_experts import hopper_experts
from graphllm.ops.moe.fused_moe.op import fused_moe
from graphllm.ops.moe.fused_moe.operands import Experts, Residual, Route
from graphllm.ops.moe.fused_moe.triton_common import SHARED, added, supports


@triton.jit(do_not_specialize_on_alignment=["P"])
def place_rows_kernel(
    x_ptr,  # [T, K]
    experts_ptr,  # [P] int32, negative for none
    sorted_ptr,  # [P, K]: rows of x in the order of experts
    order_ptr,  # [P] int32: pairs in that order
    table_ptr,  # [N, 2] int32: of each expert its first place, and its pairs
    P, X_ROW: tl.constexpr, K: tl.constexpr, A: tl.constexpr, P_PAD: tl.constexpr, BLOCK: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    """The first P programs place a pair each, after the earlier ones of its expert; the others write the table."""
    gdc_wait_early(EMULATED)
    i = tl.program_id(0)
    p = tl.arange(0, P_PAD)
    experts = tl.load(experts_ptr + p, mask=p < P, other=-1)
    if i >= P:
        expert = i - P
        tl.store(table_ptr + 2 * expert, tl.sum(((experts >= 0) & (experts < expert)).to(tl.int32), axis=0))
        tl.store(table_ptr + 2 * expert + 1, tl.sum((experts == expert).to(tl.int32), axis=0))
    else:
        expert = tl.load(experts_ptr + i)
        if expert >= 0:
            k = tl.arange(0, BLOCK)
            row = tl.load(x_ptr + (i // A).to(tl.int64) * X_ROW + k, mask=k < K)
            before = ((experts >= 0) & (experts < expert)) | ((experts == expert) & (p < i))
            place = tl.sum(before.to(tl.int32), axis=0)
            tl.store(order_ptr + place, i)
            tl.store(sorted_ptr + place.to(tl.int64) * K + k, row, mask=k < K)


Config = Mapping[str, int]
_FEWEST, _MOST = 2, 256  # tokens
_GROUP = 32  # entries of one scale
_Set = tuple[int, int, int]  # of one product's kernel: spans of a stage, teams, programs on a multiprocessor at once
_SETS: tuple[tuple[_Set, _Set], ...] = (
    ((4, 2, 1), (4, 2, 2)),
    ((4, 2, 1), (4, 2, 1)),
    ((2, 1, 2), (2, 1, 2)),
    ((2, 1, 3), (2, 1, 3)),
    ((4, 1, 2), (4, 1, 2)),
)
# Registers of a thread, by teams and programs at once: where a program begins, so that this number of programs fits,
# and the second team's.
_REGISTERS = {(1, 2): (128, 0), (1, 3): (80, 0), (2, 1): (168, 200), (2, 2): (80, 104)}


def supports_gluon(site: CallSite) -> bool:
    """Whether weights are what the kernel reads, and tokens some."""
    return _FEWEST <= site.rows("x_TD") <= _MOST and reads_experts(site)


def reads_experts(site: CallSite) -> bool:
    """Whether weights are what kernels in Gluon read, and run there."""
    scales = site.args["gate_up_scales_NG2F"], site.args["down_scales_NGD"]
    fits = site.args["form"] == "e2m1" and site.args["group"] == _GROUP and site.args["adapter_ids_T"] is None
    fits = fits and site.struct(Experts).parts == 2
    if not fits or any(s is None or s.dtype != torch.uint8 for s in scales) or not supports(site):
        return False
    inner = (site.args["x_TD"].shape[1], *site.struct(Experts).sizes[1:])
    plain = site.args["gate_up_zeros_NG2F"] is None and site.args["x_TD"].dtype == torch.bfloat16
    tensors = (t for t in site.args.values() if isinstance(t, Tensor))
    aligned = all(t.storage_offset() * t.element_size() % 16 == 0 for t in tensors)
    return runs_gluon(site.target) and plain and aligned and all(n % _GROUP == 0 for n in inner)


def gluon_configs(site: CallSite) -> list[Config]:
    """Launch constants: tokens of an expert at a time that one pass or two suffice for at even routing, for each the
    likely best sets first."""
    T, A = site.rows("x_TD"), site.args["experts_TA"].shape[1]
    N = site.args["down_NDF"].shape[0]
    usual = max(8, min(32, 1 << (max(1, T * A // N) - 1).bit_length()))
    found = [_config(site, slots, sets) for slots in sorted({usual, min(32, 2 * usual)}) for sets in _SETS]
    return [config for config in found if config["stages0"] > 1]


def _config(site: CallSite, slots: int, sets: tuple[_Set, _Set]) -> Config:
    """With as many stages as fit, and programs that have a tile each."""
    (T, A), (N, D, _) = (site.rows("x_TD"), site.args["experts_TA"].shape[1]), site.args["down_NDF"].shape
    blocks = N * -(-site.args["gate_up_N2FD"].shape[1] // 128), N * -(-D // 64)
    config = {"slots": slots, "pairs": max(16, 1 << (T * A - 1).bit_length())}
    for i, (parts, (spans, teams, at_once)) in enumerate(zip((2, 1), sets, strict=True)):
        sums = (teams - 1) * parts * 64 * slots * 4  # bytes
        size = spans * (parts * 64 * 68 + slots * 256)
        config[f"spans{i}"], config[f"teams{i}"] = spans, teams
        config[f"maxnreg{i}"], config[f"registers{i}"] = _REGISTERS[teams, at_once]
        config[f"stages{i}"] = min(8, (SHARED // at_once - 2048 - sums) // size)
        config[f"programs{i}"] = min(blocks[i], at_once * site.target.multiprocessors)
    return config


@fused_moe.impl("gluon_tokens", device="cuda", supports=supports_gluon, configs=gluon_configs)
def gluon_tokens(x_TD: Tensor, experts: Experts, route: Route, residual: Residual | None, **config: Any) -> Tensor:
    """h and what each expert gives are rounded to x's dtype."""
    weights_TA, experts_TA = route
    (T, A), (N, D, F) = experts_TA.shape, experts.sizes
    P = T * A
    # The TMA unit reads rows of whole passes, after the last pair as well.
    x_PD, h_PF = x_TD.new_empty((P + config["slots"], D)), x_TD.new_empty((P + config["slots"], F))
    y_PD = x_TD.new_empty((P, D))
    order, table = (x_TD.new_empty(shape, dtype=torch.int32) for shape in ((P,), (N, 2)))
    launch_triton(
        place_rows_kernel, (P + N,), x_TD, experts_TA, x_PD, order, table, P, X_ROW=x_TD.stride(0), K=D, A=A,
        P_PAD=config["pairs"], BLOCK=1 << (D - 1).bit_length(), EMULATED=triton.knobs.runtime.interpret, num_warps=4,
    )  # fmt: skip
    for i, (x, weight, out) in enumerate(zip((x_PD, h_PF), experts.weights, (h_PF, y_PD), strict=True)):
        scales, bias = experts.scales[i], experts.biases[i]
        hopper_experts(
            config[f"programs{i}"], x, weight, scales, x if bias is None else bias, weights_TA, table, order, out,
            WEIGHT_ROW=weight.shape[2], ROWS=weight.shape[1], K=x.shape[1], N=N, BIAS=bias is not None, GATED=i == 0,
            ACTIVATION=experts.activation, LIMIT=experts.limit, SLOTS=config["slots"], PARTS=2 - i,
            STAGES=config[f"stages{i}"], SPANS=config[f"spans{i}"], TEAMS=config[f"teams{i}"],
            REGISTERS=config[f"registers{i}"], maxnreg=config[f"maxnreg{i}"],
        )  # fmt: skip
    return added(y_PD, experts_TA, residual)
