"""Triton kernels for token_logprobs: one read of each wanted row, then a tournament for the k largest.

The scan kernel gives every tile of a row its largest logit, its sum of exponentials and how many logits beat the scored
token's. The finish kernel merges them and takes the best of the tiles' champions k times, each time looking up, only in
the winner's tile, the next one below it. Logits are compared as 64-bit integers that order by logit, then by lower id.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphllm.ir import CallSite, launch_triton
from graphllm.ir.op import each_alone
from graphllm.ops.sampling.token_logprobs.op import token_logprobs

_BLOCK = 2048  # logits of a tile
_LOG2E = tl.constexpr(1.4426950408889634)
_NOBODY = tl.constexpr(-(2**63) + 1)  # below every entry


@triton.jit
def _logits(ptr, index, V, COL: tl.constexpr):
    """float32 logits, -inf beyond the vocabulary and for NaN."""
    x = tl.load(ptr + index * COL, mask=index < V, other=float("-inf")).to(tl.float32)
    return tl.where(x != x, float("-inf"), x)


@triton.jit
def _entry(x, index, V):
    """A signed integer that orders by logit, then by lower token id; _NOBODY beyond the vocabulary."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # one zero
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(index < V, (key.to(tl.int64) << 32) + (0x7FFFFFFF - index), _NOBODY)


@triton.jit
def _logit_of(entry):
    key = (entry >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _token_of(entry):
    return 0x7FFFFFFF - (entry & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _scored(row_ptr, tokens_ptr, target_ptr, s, V, COL: tl.constexpr):
    """The token with the wanted probability, or -1, and its logit."""
    target = tl.load(target_ptr + s)
    token = tl.where(target >= 0, target, tl.load(tokens_ptr + s))
    return token, tl.where(token >= 0, _logits(row_ptr, tl.maximum(token, 0), V, COL), float("-inf"))


@triton.jit
def _scan_kernel(
    logits_ptr, tokens_ptr, target_ptr, wanted_ptr,
    best_ptr,  # [S, TILES] the entry of the tile's largest logit
    sum_ptr,  # [S, TILES] sum of exp(logit - largest)
    larger_ptr,  # [S, TILES] logits larger than the scored one
    V: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    s = tl.program_id(1)
    if tl.load(wanted_ptr + s) >= 0:
        row_ptr = logits_ptr + s.to(tl.int64) * ROW
        index = tile * BLOCK + tl.arange(0, BLOCK)
        x = _logits(row_ptr, index, V, COL)
        _, scored = _scored(row_ptr, tokens_ptr, target_ptr, s, V, COL)
        best = tl.max(_entry(x, index, V), axis=0)
        top = _logit_of(best)
        shift = tl.where(top > float("-inf"), top, 0.0)
        at = s * TILES + tile
        tl.store(best_ptr + at, best)
        tl.store(sum_ptr + at, tl.sum(tl.exp2((x - shift) * _LOG2E), axis=0))
        tl.store(larger_ptr + at, tl.sum((x > scored).to(tl.int32), axis=0))


@triton.jit
def _logprob(x, shift, log_sum):
    return tl.where(x > float("-inf"), x - shift - log_sum, float("-inf"))


@triton.jit
def _finish_kernel(
    logits_ptr, tokens_ptr, target_ptr, wanted_ptr, best_ptr, sum_ptr, larger_ptr, out_ptr, K: tl.constexpr,
    COLUMNS: tl.constexpr, TABLE: tl.constexpr, V: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr,
    TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0)
    out_row_ptr = out_ptr + s * (2 + 2 * K)
    if tl.load(wanted_ptr + s) < 0:
        column = tl.arange(0, COLUMNS)
        tl.store(out_row_ptr + column, tl.zeros([COLUMNS], tl.float32), mask=column < 2 + 2 * K)
    else:
        row_ptr = logits_ptr + s.to(tl.int64) * ROW
        tile = tl.arange(0, TABLE)
        there = tile < TILES
        best = tl.load(best_ptr + s * TILES + tile, mask=there, other=_NOBODY)
        tops = tl.where(there, _logit_of(best), float("-inf"))
        top = tl.max(tops, axis=0)
        shift = tl.where(top > float("-inf"), top, 0.0)
        sums = tl.load(sum_ptr + s * TILES + tile, mask=there, other=0.0)
        log_sum = tl.log(tl.sum(sums * tl.exp2((tops - shift) * _LOG2E), axis=0))
        larger = tl.sum(tl.load(larger_ptr + s * TILES + tile, mask=there, other=0), axis=0)
        token, scored = _scored(row_ptr, tokens_ptr, target_ptr, s, V, COL)
        tl.store(out_row_ptr, _logprob(scored, shift, log_sum))
        tl.store(out_row_ptr + 1, tl.where(token >= 0, larger + 1, V).to(tl.float32))
        for n in range(K):
            first = tl.max(best, axis=0)
            found = first > _NOBODY
            x = tl.where(found, _logit_of(first), float("-inf"))
            id = tl.where(found, _token_of(first), 0)
            tl.store(out_row_ptr + 2 + n, _logprob(x, shift, log_sum))
            tl.store(out_row_ptr + 2 + K + n, id.to(tl.float32))
            index = id // BLOCK * BLOCK + tl.arange(0, BLOCK)
            entry = _entry(_logits(row_ptr, index, V, COL), index, V)
            next_best = tl.max(tl.where(entry < first, entry, _NOBODY), axis=0)
            best = tl.where(tile == id // BLOCK, next_best, best)


def _supports(site: CallSite) -> bool:
    return site.args["logits_SV"].dtype in (torch.float32, torch.float16, torch.bfloat16)


@token_logprobs.impl("triton_token_logprobs", device="cuda", supports=_supports, row_order=each_alone)
def triton_token_logprobs(logits_SV: Tensor, tokens_S: Tensor, target_S: Tensor, wanted_S: Tensor, k: int) -> Tensor:
    """Two launches; rows not wanted cost a load and a line of zeros."""
    S, V = logits_SV.shape
    tiles = triton.cdiv(V, _BLOCK)

    def scratch(*shape: object, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits_SV.device)  # type: ignore[arg-type]

    out = scratch(S, 2 + 2 * k)
    row = (logits_SV, tokens_S, target_S, wanted_S)
    found = (scratch(S, tiles, dtype=torch.int64), scratch(S, tiles), scratch(S, tiles, dtype=torch.int32))
    sizes = {
        "V": V, "ROW": logits_SV.stride(0), "COL": logits_SV.stride(1), "TILES": tiles, "BLOCK": _BLOCK,
    }  # fmt: skip
    launch_triton(_scan_kernel, (tiles, S), *row, *found, **sizes, num_warps=4)
    launch_triton(
        _finish_kernel, (S,), *row, *found, out,
        K=k, COLUMNS=triton.next_power_of_2(2 + 2 * k), TABLE=triton.next_power_of_2(tiles), **sizes, num_warps=4,
    )  # fmt: skip
    return out
