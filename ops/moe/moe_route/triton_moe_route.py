"""Triton kernel for moe_route: a program chooses the experts of one token and holds its scores in registers."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ir.pdl import gdc_wait_early
from graphllm.ops.moe.moe_route.op import Routing, moe_route

LOWEST = tl.constexpr(-1e30)  # of two groups' sum, too, more than -inf


@triton.jit
def _largest(values, at, PAD: tl.constexpr):
    """The largest of values, and the first place that has it."""
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where(values == best, at, PAD), axis=0)


@triton.jit
def _scores(logits, highest, total, SIGMOID: tl.constexpr):
    if SIGMOID:
        return 1.0 / (1.0 + tl.exp(-logits))
    else:
        return tl.exp(logits - highest) / total


@triton.jit
def route_kernel(
    logits_ptr,  # [T, N]
    bias_ptr,  # [N]
    share_ptr,  # [T, 1]
    weights_ptr,  # [T, k] float32
    experts_ptr,  # [T, k] int32
    LOGITS_ROW: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr,
    SIGMOID: tl.constexpr, BIAS: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr, GROUPS: tl.constexpr,
    KEPT: tl.constexpr, SHARED: tl.constexpr, SHARED_PAD: tl.constexpr, SHARE: tl.constexpr, SHARE_ROW: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    gdc_wait_early(EMULATED)
    t = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, N_PAD)
    logits = tl.load(logits_ptr + t * LOGITS_ROW + n, mask=n < N, other=float("-inf")).to(tl.float32)
    highest = tl.max(logits, axis=0)
    total = tl.sum(tl.exp(logits - highest), axis=0)
    scores = _scores(logits, highest, total, SIGMOID)
    ranked = logits
    if BIAS:
        ranked = tl.where(n < N, scores + tl.load(bias_ptr + n, mask=n < N, other=0.0), float("-inf"))
    # Numbers that are none rank last: of a row of them, too, experts that exist are chosen.
    ranked = tl.where((n < N) & ~(ranked > LOWEST), LOWEST, ranked)
    if GROUPS > 1:  # N is a power of two
        g = tl.arange(0, GROUPS)
        m = tl.arange(0, N // GROUPS)
        members = tl.reshape(ranked, [GROUPS, N // GROUPS])
        best = tl.max(members, axis=1)
        if BIAS:  # and the second
            at = tl.min(tl.where(members == best[:, None], m[None, :], N), axis=1)
            best += tl.max(tl.where(m[None, :] == at[:, None], float("-inf"), members), axis=1)
        kept = g < 0
        for _ in tl.static_range(KEPT):
            _best, at = _largest(tl.where(kept, float("-inf"), best), g, GROUPS)
            kept = kept | (g == at)
        ranked = tl.reshape(tl.where(kept[:, None], members, float("-inf")), [N_PAD])
    k = tl.arange(0, K_PAD)
    weights = tl.zeros([K_PAD], tl.float32)
    experts = tl.zeros([K_PAD], tl.int32)
    for i in tl.static_range(K):
        best, at = _largest(ranked, n, N_PAD)
        score = tl.sum(tl.where(n == at, scores, 0.0), axis=0) if BIAS else _scores(best, highest, total, SIGMOID)
        weights = tl.where(k == i, score, weights)
        experts = tl.where(k == i, at, experts)
        ranked = tl.where(n == at, float("-inf"), ranked)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, axis=0)
    row = t * (K + SHARED + SHARE)
    tl.store(weights_ptr + row + k, weights * SCALE, mask=k < K)
    tl.store(experts_ptr + row + k, experts, mask=k < K)
    row += K
    if SHARED:
        more = tl.arange(0, SHARED_PAD)
        tl.store(weights_ptr + row + more, tl.full([SHARED_PAD], 1.0, tl.float32), mask=more < SHARED)
        tl.store(experts_ptr + row + more, N + more, mask=more < SHARED)
    if SHARE:
        share = tl.load(share_ptr + t * SHARE_ROW).to(tl.float32)
        tl.store(weights_ptr + row + SHARED, 1.0 / (1.0 + tl.exp(-share)))
        tl.store(experts_ptr + row + SHARED, N + SHARED)


def _supports(site: CallSite) -> bool:
    """One expert after the other is not written here; groups are, of a number of experts that is a power of two."""
    logits, bias, groups = site.args["logits_TN"], site.args["bias_N"], site.args["groups"]
    N = logits.shape[1]
    return (
        site.args["scoring"] in ("softmax", "sigmoid")
        and logits.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and logits.stride(-1) == 1
        and N <= 1024
        and (groups == 1 or (N & (N - 1) == 0 and groups & (groups - 1) == 0))
        and (bias is None or bias.is_contiguous())
    )


@moe_route.impl("triton", device="cuda", supports=_supports)
def triton_route(logits_TN: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    k, scoring, renormalize, scale, groups, kept_groups, bias_N, _, shared, share_T1 = routing
    T, N = logits_TN.shape
    weights = torch.empty((T, routing.width), dtype=torch.float32, device=logits_TN.device)
    experts = torch.empty((T, routing.width), dtype=torch.int32, device=logits_TN.device)
    launch_triton(
        route_kernel, (T,), logits_TN, logits_TN if bias_N is None else bias_N,
        logits_TN if share_T1 is None else share_T1, weights, experts,
        LOGITS_ROW=logits_TN.stride(0), N=N, N_PAD=1 << (N - 1).bit_length(), K=k, K_PAD=1 << (k - 1).bit_length(),
        SIGMOID=scoring == "sigmoid", BIAS=bias_N is not None, RENORMALIZE=renormalize, SCALE=scale, GROUPS=groups,
        KEPT=kept_groups, SHARED=shared, SHARED_PAD=1 << max(0, shared - 1).bit_length(), SHARE=share_T1 is not None,
        SHARE_ROW=0 if share_T1 is None else share_T1.stride(0),
        EMULATED=triton.knobs.runtime.interpret, num_warps=1,
    )  # fmt: skip
    return weights, experts
