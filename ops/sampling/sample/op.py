"""sample: draw one token per sequence from its logits, each sequence with its own parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.sampling.sample.operands import Sampling


def _mix32(x: Tensor) -> Tensor:
    """A bijective 32-bit finalizer on int64 tensors holding 32-bit values (two rounds of xor-shift and multiply)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def uniform_bits(seed_S: Tensor, sample_index_S: Tensor, width: int) -> Tensor:
    """[S, width] int64 in [0, 2^32): the counter-based random bits of `sample` for token ids 0..width-1.

    bits = mix(token * 0x9E3779B9 + mix(sample_index ^ mix(low32(seed) ^ mix(high32(seed))))), all modulo 2^32.
    """
    key = _mix32((seed_S & 0xFFFFFFFF) ^ _mix32((seed_S >> 32) & 0xFFFFFFFF))
    key = _mix32((sample_index_S & 0xFFFFFFFF) ^ key)
    token = torch.arange(width, device=seed_S.device, dtype=torch.int64)
    return _mix32((token * 0x9E3779B9 + key[:, None]) & 0xFFFFFFFF)


def filtered(
    logits_SV: Tensor, temperature_S: Tensor, top_k_S: Tensor, top_p_S: Tensor, min_p_S: Tensor
) -> tuple[Tensor, Tensor]:
    """float32 logits without NaN, and the scaled ones less the row's largest, -inf where `sample` drops the token."""
    logits = torch.nan_to_num(logits_SV.float(), nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    V = logits.shape[1]
    scaled = logits / torch.where(temperature_S > 0, temperature_S, 1.0)[:, None]
    off_max = scaled - scaled.max(dim=-1, keepdim=True).values
    dropped = float("-inf")
    kept = off_max.masked_fill(off_max < torch.log(min_p_S)[:, None], dropped)
    descending = torch.sort(kept, dim=-1, descending=True).values
    k = torch.where((top_k_S > 0) & (top_k_S < V), top_k_S, V).long()
    kept = kept.masked_fill(kept < descending.gather(1, k[:, None] - 1), dropped)
    descending = descending.masked_fill(torch.arange(V, device=logits.device)[None] >= k[:, None], dropped)
    mass = torch.softmax(descending, dim=-1)
    inside = (mass.cumsum(dim=-1) - mass < top_p_S[:, None]) | (top_p_S[:, None] >= 1)
    last = descending.masked_fill(~inside, float("inf")).min(dim=-1, keepdim=True).values
    return logits, kept.masked_fill(kept < last, dropped)


def uniform(bits: Tensor) -> Tensor:
    """float32 in (0, 1), below 1: else a row's only token could tie in the race with tokens of -inf."""
    return ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def _cost(logits_SV: Tensor) -> Cost:
    return Cost(nbytes(logits_SV), 12 * logits_SV.numel())


@op(boundary=True, cost=_cost)
def sample(logits_SV: Tensor, sampling: Sampling) -> Tensor:
    """One token id per row: greedy, or a random draw after temperature, min-p, top-k and top-p, in this order.

    logits_SV [S, V], any float dtype, computed in float32. The random bits are a pure function of (seed, sample_index,
    token), see `uniform_bits`, so a sequence's draws do not depend on the batch; the winner is the argmin
    of -log1p(-u) / probability with u = (bits + 0.5) / 2^32, at most 1 - 2^-24 (an exponential race). NaN logits are
    treated as -inf, and a token of -inf is never chosen. Returns [S] int32: -1 for a row without any other token,
    greedy or drawn. Source: Holtzman et al. 2020 (top-p), Nguyen et al. 2024 (min-p), Gumbel-max in its exponential
    form.
    """
    logits, kept = filtered(logits_SV, *sampling[:4])
    greedy = torch.argmax(logits, dim=-1)
    possible = logits.max(dim=-1).values > float("-inf")
    u = uniform(uniform_bits(sampling.seed_S, sampling.sample_index_S, logits.shape[1]))
    race = kept - torch.log(-torch.log1p(-u))
    drawn = torch.argmax(race, dim=-1)
    return torch.where(possible, torch.where(sampling.temperature_S > 0, drawn, greedy), -1).to(torch.int32)


@sample.fake(traceable=True)
def _(logits_SV: Tensor) -> Tensor:
    return logits_SV.new_empty(logits_SV.shape[0], dtype=torch.int32)
