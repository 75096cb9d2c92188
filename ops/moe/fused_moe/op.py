"""fused_moe: the feed-forward layers of the experts that were chosen for each token, added up by weight."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from einops import rearrange, reduce
from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.encodings.encoded_weights import decoded
from graphllm.ops.lora.add_lora.op import adapted

LORA_TABLES = ("gate_up_lora_a_LNRD", "gate_up_lora_b_LNrO", "down_lora_a_LNrF", "down_lora_b_LNrD")


def _cost(
    x_TD: Tensor, gate_up_N2FD: Tensor, down_NDF: Tensor, weights_TA: Tensor, experts_TA: Tensor, **others: Any
) -> Cost:
    (T, A), (N, twice), D = experts_TA.shape, gate_up_N2FD.shape[:2], x_TD.shape[1]
    own = {n: t for n, t in others.items() if isinstance(t, Tensor) and n not in (*LORA_TABLES, "adapter_ids_T")}
    of_one = nbytes(*(t[:1] for t in (gate_up_N2FD, down_NDF, *own.values())))
    tables = lora_cost(T, A, others)
    read = int(distinct_experts(T, N, A) * of_one) + tables.bytes
    return Cost(read + 2 * nbytes(x_TD) + nbytes(weights_TA, experts_TA), 3 * T * A * twice * D + tables.flops)


def lora_cost(T: int, A: int, arguments: Mapping[str, Any]) -> Cost:
    """Of the tables of adapters among an op's arguments, in the cheapest step with some, one with a single adapter."""
    tables = [arguments.get(name) for name in LORA_TABLES]
    given = [t for t in tables if t is not None]
    if not given:
        return Cost(0, 0)
    N = given[0].shape[1]
    of_expert = sum(t.shape[2] * t.shape[3] for t in given)
    return Cost(int(distinct_experts(T, N, A) * of_expert) * given[0].element_size(), 2 * T * A * of_expert)


def distinct_experts(T: int, N: int, A: int) -> float:
    """How many of N experts T tokens are expected to choose when each chooses A of them at random."""
    return N * (1 - (1 - A / N) ** T)


@op(cost=_cost, rowwise=True, neutral=("adapter_ids_T", LORA_TABLES))
def fused_moe(
    x_TD: Tensor,
    gate_up_N2FD: Tensor,
    down_NDF: Tensor,
    weights_TA: Tensor,
    experts_TA: Tensor,
    activation: str = "silu",
    limit: float = 0.0,
    gate_up_bias_N2F: Tensor | None = None,
    down_bias_ND: Tensor | None = None,
    gate_up_scales_NG2F: Tensor | None = None,
    gate_up_zeros_NG2F: Tensor | None = None,
    down_scales_NGD: Tensor | None = None,
    down_zeros_NGD: Tensor | None = None,
    form: str = "",
    group: int = 0,
    gate_up_lora_a_LNRD: Tensor | None = None,
    gate_up_lora_b_LNrO: Tensor | None = None,
    down_lora_a_LNrF: Tensor | None = None,
    down_lora_b_LNrD: Tensor | None = None,
    adapter_ids_T: Tensor | None = None,
) -> Tensor:
    """sum over a of weights_TA[:, a] * mlp(x_TD, experts_TA[:, a]): [T, D] in x's dtype, contiguous.

    x_TD [T, D]. gate_up_N2FD [N, 2F, D]: of each of the N experts, the rows of the gate before those of up. down_NDF
    [N, D, F]. weights_TA [T, A] float32. experts_TA [T, A] int32: the experts of each token, all different; a negative
    number is none, and counts nothing. gate_up_bias_N2F [N, 2F] and down_bias_ND [N, D] are added to the products.

    mlp(x, n) = down_NDF[n] @ h + bias, with h = act(gate) * up, gate and up from gate_up_N2FD[n] @ x + bias. act is
    "silu", or "gelu_tanh"; or "clamped": gate is at most ``limit``, up between -limit and limit, and h = (up + 1) *
    gate * sigmoid(1.702 * gate).

    Scales, zeros, form and group: where the matrices are encoded, each expert's as
    `graphllm.ops.encodings.encoded_weights.decoded` says; a decoded matrix may be rounded to x's dtype.

    Low-rank adapters: to each of an expert's products belongs (x @ A.T) @ B as for `add_lora`, with the tables of the
    token's adapter and that expert, before the activation; for down x is h, as it was rounded. gate_up_lora_a_LNRD [L,
    N, 2r, D], r rows for the gate before those for up, gate_up_lora_b_LNrO [L, N, r, 2F], down_lora_a_LNrF [L, N, r,
    F], down_lora_b_LNrD [L, N, r, D], in x's dtype. adapter_ids_T [T] int32, 0 for tokens without one. All of them are
    given, or none.

    Products, biases and activation are in float32 (float64 for float64 inputs); h is rounded to x's dtype once, and the
    weighted sum once in the end. Sources: Shazeer et al. 2017; OpenAI 2025, gpt-oss (clamped).
    """
    T, A = experts_TA.shape
    N, D = gate_up_N2FD.shape[0], x_TD.shape[1]
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    experts = experts_TA.flatten().long()
    out_PD = torch.zeros(T * A, D, dtype=wide, device=x_TD.device)
    # The pairs of a token and an expert, in the order of the experts.
    order = torch.argsort(experts, stable=True)
    ends = torch.searchsorted(experts[order], torch.arange(N + 1, device=x_TD.device)).tolist()
    for n, (begin, end) in enumerate(itertools.pairwise(ends)):
        if begin == end:
            continue
        pairs = order[begin:end]
        first, second = gate_up_N2FD[n], down_NDF[n]
        if gate_up_scales_NG2F is not None and down_scales_NGD is not None:
            zeros = [None if z is None else z[n] for z in (gate_up_zeros_NG2F, down_zeros_NGD)]
            first = decoded(first, gate_up_scales_NG2F[n], zeros[0], form, group, D).to(x_TD.dtype)
            second = decoded(second, down_scales_NGD[n], zeros[1], form, group, len(first) // 2).to(x_TD.dtype)
        rows = x_TD[pairs // A]
        gate_up = rows.to(wide) @ first.to(wide).T
        ids = None if adapter_ids_T is None else adapter_ids_T[pairs // A]
        if gate_up_bias_N2F is not None:
            gate_up = gate_up + gate_up_bias_N2F[n].to(wide)
        tables = (gate_up_lora_a_LNRD, gate_up_lora_b_LNrO, down_lora_a_LNrF, down_lora_b_LNrD)
        first_a, first_b, second_a, second_b = (None if t is None else t[:, n] for t in tables)
        gate_up = adapted(gate_up, rows, first_a, first_b, ids, [gate_up.shape[1] // 2] * 2)
        hidden = activate(gate_up, activation, limit).to(x_TD.dtype)
        out = adapted(hidden.to(wide) @ second.to(wide).T, hidden, second_a, second_b, ids, [D])
        out_PD[pairs] = out if down_bias_ND is None else out + down_bias_ND[n].to(wide)
    weighted_PD = out_PD * rearrange(weights_TA.to(wide), "t a -> (t a) 1")
    return reduce(weighted_PD, "(t a) d -> t d", "sum", a=A).to(x_TD.dtype)


def activate(gate_up: Tensor, activation: str, limit: float) -> Tensor:
    """act(gate) * up of rows of 2F, as `fused_moe` says."""
    gate, up = gate_up.chunk(2, -1)
    if activation == "clamped":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    return torch.nn.functional.silu(gate) * up


@fused_moe.fake
def _(x_TD: Tensor) -> Tensor:
    return x_TD.new_empty(x_TD.shape)
