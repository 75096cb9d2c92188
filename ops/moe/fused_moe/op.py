"""fused_moe: the feed-forward layers of the experts that were chosen for each token, added up by weight."""

from __future__ import annotations

import itertools

import torch
from einops import rearrange, reduce
from torch import Tensor

from graphllm.ir import Cost, nbytes, op
from graphllm.ops.encodings.encoded_weights import decoded
from graphllm.ops.lora.add_lora.op import adapted
from graphllm.ops.lora.add_lora.operands import LowRank
from graphllm.ops.lora.add_lora.tuning import every_adapter
from graphllm.ops.moe.fused_moe.operands import LORA_TABLES, ExpertLora, Experts, Residual, Route
from graphllm.ops.norms.rms_norm import rms_norm


def _cost(x_TD: Tensor, experts: Experts, route: Route, lora: ExpertLora | None, residual: Residual | None) -> Cost:
    (T, A), (N, D, F) = route.experts_TA.shape, experts.sizes
    own = (*experts.weights, *experts.biases, *experts.scales, *experts.zeros)
    of_one = nbytes(*(t[:1] for t in own if t is not None))
    tables, around = lora_cost(T, A, lora), nbytes(residual.residual_TD, residual.norm_D) if residual else 0
    read = int(distinct_experts(T, N, A) * of_one) + tables.bytes + around
    return Cost(read + 2 * nbytes(x_TD) + nbytes(*route), 2 * (experts.parts + 1) * T * A * F * D + tables.flops)


def lora_cost(T: int, A: int, lora: ExpertLora | None) -> Cost:
    """Of the tables of adapters in the cheapest step with some, one with a single adapter."""
    if lora is None:
        return Cost(0, 0)
    tables = lora.tables
    N = tables[0].shape[1]
    of_expert = sum(t.shape[2] * t.shape[3] for t in tables)
    return Cost(int(distinct_experts(T, N, A) * of_expert) * tables[0].element_size(), 2 * T * A * of_expert)


def distinct_experts(T: int, N: int, A: int) -> float:
    """How many of N experts T tokens are expected to choose when each chooses A of them at random."""
    return N * (1 - (1 - A / N) ** T)


@op(cost=_cost, rowwise=True, neutral=("adapter_ids_T", LORA_TABLES))
def fused_moe(
    x_TD: Tensor, experts: Experts, route: Route, lora: ExpertLora | None = None, residual: Residual | None = None
) -> Tensor:
    """sum over a of weights_TA[:, a] * mlp(x_TD, experts_TA[:, a]): [T, D] in x's dtype, contiguous.

    x_TD [T, D]. mlp(x, n) = down_NDF[n] @ h + bias, with h = act(gate) * up, gate and up from gate_up_N2FD[n] @ x +
    bias. act is "silu", or "gelu_tanh"; or "clamped": gate is at most ``limit``, up between -limit and limit, and h =
    (up + 1) * gate * sigmoid(1.702 * gate). "relu2" has no gate: h = relu(up) ** 2.

    lora: to each of an expert's products belongs (x @ A.T) @ B as for `add_lora`, with the tables of the token's
    adapter and that expert, before the activation; for down x is h, as it was rounded.

    residual: is added to the sum. The experts get the `rms_norm` of x, with offset 0, where it has a norm. An
    implementation may add in float32 and round once, and leave the normalized rows unrounded.

    Products, biases and activation are in float32 (float64 for float64 inputs); h is rounded to x's dtype once, and the
    weighted sum once in the end. Sources: Shazeer et al. 2017; OpenAI 2025, gpt-oss (clamped); So et al. 2021, Primer
    (relu2).
    """
    if residual is not None:
        if residual.norm_D is not None:
            x_TD = rms_norm.reference(x_TD, residual.norm_D, residual.eps)
        return residual.residual_TD + fused_moe.reference(x_TD, experts, route, lora)
    T, A = route.experts_TA.shape
    N, D, F = experts.sizes
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    chosen = route.experts_TA.flatten().long()
    out_PD = torch.zeros(T * A, D, dtype=wide, device=x_TD.device)
    # The pairs of a token and an expert, in the order of the experts.
    order = torch.argsort(chosen, stable=True)
    ends = torch.searchsorted(chosen[order], torch.arange(N + 1, device=x_TD.device)).tolist()
    for n, (begin, end) in enumerate(itertools.pairwise(ends)):
        if begin == end:
            continue
        pairs = order[begin:end]
        first, second = (_matrix(experts, i, n, width, x_TD.dtype) for i, width in enumerate((D, F)))
        rows = x_TD[pairs // A]
        gate_up = rows.to(wide) @ first.to(wide).T
        if experts.gate_up_bias_N2F is not None:
            gate_up = gate_up + experts.gate_up_bias_N2F[n].to(wide)
        first_lora, second_lora = _tables_of(lora, n, pairs // A, ([F] * experts.parts, [D]))
        gate_up = adapted(gate_up, rows, first_lora)
        hidden = activate(gate_up, experts.activation, experts.limit).to(x_TD.dtype)
        out = adapted(hidden.to(wide) @ second.to(wide).T, hidden, second_lora)
        out_PD[pairs] = out if experts.down_bias_ND is None else out + experts.down_bias_ND[n].to(wide)
    weighted_PD = out_PD * rearrange(route.weights_TA.to(wide), "t a -> (t a) 1")
    return reduce(weighted_PD, "(t a) d -> t d", "sum", a=A).to(x_TD.dtype)


def _tables_of(
    lora: ExpertLora | None, n: int, tokens: Tensor, widths: tuple[list[int], list[int]]
) -> tuple[LowRank | None, LowRank | None]:
    """Of both products of an expert, for some tokens."""
    if lora is None:
        return None, None
    ids = lora.adapter_ids_T[tokens]
    first, second = (LowRank(a[:, n], b[:, n], ids, w) for a, b, w in zip(lora.a, lora.b, widths, strict=True))
    return first, second


def _matrix(experts: Experts, i: int, n: int, width: int, dtype: torch.dtype) -> Tensor:
    """An expert's matrix of the first or second product, in plain numbers."""
    weight, scales, zeros = experts.weights[i][n], experts.scales[i], experts.zeros[i]
    if scales is None:
        return weight
    none = None if zeros is None else zeros[n]
    return decoded(weight, scales[n], none, experts.form, experts.group, width).to(dtype)


def activate(gate_up: Tensor, activation: str, limit: float) -> Tensor:
    """act(gate) * up of rows of 2F, or of up alone, as `fused_moe` says."""
    if activation == "relu2":
        return torch.relu(gate_up).square()
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


@fused_moe.tuning_inputs
def even_routing(experts: Experts, route: Route, lora: ExpertLora | None) -> dict[str, Tensor]:
    """Experts of each token and their weights, and adapters, on the device of the given tensors and of their shapes.
    All tokens choose at random, as a trained router nearly does over many, and have one adapter after the other."""
    (T, A), N, device = route.experts_TA.shape, experts.sizes[0], route.experts_TA.device
    chosen = torch.rand((T, N), device=device).topk(A, -1).indices.to(torch.int32)
    weights = torch.softmax(torch.randn_like(route.weights_TA), -1)
    return {
        "experts_TA": chosen,
        "weights_TA": weights,
        **(every_adapter(lora.adapter_ids_T, lora.down_lora_a_LNrF) if lora else {}),
    }
