"""Triton kernel for rejection_sample: one program for each row, which reads its logits a few times.

Thresholds and random numbers are the same as in sample. A row without a filter is read for its maximum, for its mass
and for the race; filters are searched over the whole row, not over candidates as in sample.
"""

# mypy: allow-untyped-defs
# ruff: noqa: SIM102  (a branch on a constexpr is not a condition like others)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ops.sampling.sample.triton_sample import (
    KEY_SHIFT,
    _key,
    _weight,
    exponential,
    filters,
    logits_at,
    off_top,
    row_bits_of,
    threshold,
    token_bits,
    uniform,
)
from graphllm.ops.speculation.rejection_sample.op import rejection_sample
from graphllm.ops.speculation.rejection_sample.operands import Proposal, RowSampling

_BLOCK = 2048


@triton.jit
def _race(
    row_ptr, probs_ptr,
    residual,  # whether the draft's distribution is taken off
    cut, floor, temperature, top_logit, share, row_bits, V: tl.constexpr, COL: tl.constexpr, PROBS: tl.constexpr,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The winner of the race among what the filters keep; -1 where nothing is left of it."""
    lane = tl.arange(0, BLOCK)
    top = tl.div_rn(top_logit, temperature)
    score = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.full([BLOCK], V - 1, tl.int32)
    for start in range(0, V, BLOCK):
        index = start + lane
        x = logits_at(row_ptr, index, V, COL)
        off = off_top(x, temperature, top)
        kept = (index < V) & (_key(x, SHIFT) >= cut) & (off >= floor)
        value = off
        if PROBS:
            if residual:
                left = tl.exp(off) * share - tl.load(probs_ptr + index, mask=index < V, other=0.0)
                kept = kept & (left > 0)
                value = tl.log(tl.where(kept, left, 1.0))
        race = value - tl.log(exponential(uniform(token_bits(index, row_bits))))
        race = tl.where(kept, race, float("-inf"))
        better = race > score
        score = tl.where(better, race, score)
        token = tl.where(better, index, token)
    best = tl.max(score, axis=0)
    return tl.where(best > float("-inf"), tl.min(tl.where(score == best, token, V - 1), axis=0), -1)


@triton.jit
def _reject_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, sample_index_ptr, drafts_ptr, slots_ptr,
    place_ptr, probs_ptr, out_ptr, V: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr,
    SLOT: tl.constexpr, PLACE: tl.constexpr, PROBS: tl.constexpr, TYPICAL: tl.constexpr, ALPHA: tl.constexpr,
    RATE: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    row_ptr = logits_ptr + r.to(tl.int64) * ROW
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        x = logits_at(row_ptr, start + lane, V, COL)
        better = x > best
        best = tl.where(better, x, best)
        at = tl.where(better, start + lane, at)
    top_logit = tl.max(best, axis=0)
    possible = top_logit > float("-inf")
    token = tl.where(possible, tl.min(tl.where(best == top_logit, at, V - 1), axis=0), -1)

    draft = tl.load(drafts_ptr + r)
    drafted = (draft >= 0) & possible
    row_bits = row_bits_of(tl.load(seed_ptr + r), tl.load(sample_index_ptr + r))
    coin = uniform(token_bits(tl.full([], V, tl.int32), row_bits))
    accepted = drafted & (coin < RATE)
    temperature = tl.load(temperature_ptr + r)
    if (temperature > 0) & possible & (not accepted):
        top_k, top_p, min_p = tl.load(top_k_ptr + r), tl.load(top_p_ptr + r), tl.load(min_p_ptr + r)
        by_k, by_p, by_min = filters(top_k, top_p, min_p, V)
        top = tl.div_rn(top_logit, temperature)
        rate = 1.4426950408889634 / temperature
        mass = 0.0
        if by_p & (not (by_k | by_min)):
            sums = tl.zeros([BLOCK], tl.float32)
            for start in range(0, V, BLOCK):
                sums += _weight(logits_at(row_ptr, start + lane, V, COL), top_logit, rate)
            mass = tl.sum(sums, axis=0)
        least = tl.zeros([], tl.uint32)
        cut, floor = threshold(
            row_ptr, V, least, temperature, top_logit, top_k, top_p, min_p, mass, V, COL, SHIFT, BLOCK
        )
        share = 1.0
        q_ptr = probs_ptr
        if PROBS | (TYPICAL > 0):
            if drafted:
                sums = tl.zeros([BLOCK], tl.float32)
                spread = tl.zeros([BLOCK], tl.float32)
                for start in range(0, V, BLOCK):
                    x = logits_at(row_ptr, start + lane, V, COL)
                    off = off_top(x, temperature, top)
                    kept = (x > float("-inf")) & (_key(x, SHIFT) >= cut) & (off >= floor)
                    weight = tl.where(kept, tl.exp(off), 0.0)
                    sums += weight
                    spread += tl.where(kept, off, 0.0) * weight
                whole = tl.sum(sums, axis=0)
                share = 1.0 / whole
                x = tl.load(row_ptr + draft * COL).to(tl.float32)
                off = off_top(x, temperature, top)
                p = tl.where((x > float("-inf")) & (_key(x, SHIFT) >= cut) & (off >= floor), tl.exp(off) / whole, 0.0)
                if PROBS:
                    place = tl.minimum(tl.maximum(tl.load(place_ptr + r), 0), K - 1)
                    q_ptr = probs_ptr + tl.load(slots_ptr + r).to(tl.int64) * SLOT + place * PLACE
                    accepted = coin * tl.load(q_ptr + draft) < p
                else:
                    entropy = tl.log(whole) - tl.sum(spread, axis=0) / whole
                    accepted = (p > 0) & (p >= tl.minimum(TYPICAL, ALPHA * tl.exp(-entropy)))
        if not accepted:
            token = _race(
                row_ptr, q_ptr, drafted, cut, floor, temperature, top_logit, share, row_bits, V, COL, PROBS, SHIFT,
                BLOCK,
            )  # fmt: skip
            if token < 0:
                token = _race(
                    row_ptr, q_ptr, False, cut, floor, temperature, top_logit, share, row_bits, V, COL, False, SHIFT,
                    BLOCK,
                )  # fmt: skip
    tl.store(out_ptr + r, tl.where(accepted, draft, token))


def _supports(site: CallSite) -> bool:
    logits, probs = site.args["logits_RV"], site.args["draft_probs_NKV"]
    return logits.dtype in KEY_SHIFT and (
        probs is None or (probs.dtype == torch.float32 and probs.stride(-1) == 1 and probs.shape[1] > 0)
    )


@rejection_sample.impl("triton_rejection_sample", device="cuda", supports=_supports)
def triton_rejection_sample(logits_RV: Tensor, sampling: RowSampling, proposal: Proposal) -> Tensor:
    """One launch."""
    R, V = logits_RV.shape
    out_R = torch.empty(R, dtype=torch.int32, device=logits_RV.device)
    given = proposal.draft_probs_NKV
    probs = sampling.temperature_R if given is None else given
    K, slot, place = (1, 0, 0) if given is None else (given.shape[1], given.stride(0), given.stride(1))
    launch_triton(
        _reject_kernel, (R,), logits_RV, *sampling, *proposal[:3], probs, out_R,
        V=V, K=K, ROW=logits_RV.stride(0), COL=logits_RV.stride(1), SLOT=slot, PLACE=place, PROBS=given is not None,
        TYPICAL=proposal.typical_threshold, ALPHA=proposal.typical_alpha, RATE=proposal.synthetic_rate,
        SHIFT=KEY_SHIFT[logits_RV.dtype], BLOCK=_BLOCK, num_warps=16,
    )  # fmt: skip
    return out_R
