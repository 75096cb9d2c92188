"""Inputs for fused_moe: routing at random, skewed, collapsed on one expert, with none for some; every activation; with
a residual, and with a norm for one token."""

from __future__ import annotations

from typing import Any, Literal

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker
from graphllm.ops.encodings.encoded_weights import encoded
from graphllm.ops.moe.fused_moe.operands import parts_of

_TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 1.2e-3}
_REASON = "hidden numbers, what each expert gives and the sum are rounded to the dtype, in the interpreter towards zero"
# x @ A.T is rounded as well, and the sum after it; or normalized rows are.
_ROUNDED = {"float32": 2e-6, "bfloat16": 1.6e-2, "float16": 2e-3}
Routing = Literal["random", "skewed", "collapsed", "some_none"]


def choose(make: Maker, T: int, N: int, k: int, routing: Routing) -> torch.Tensor:
    """Experts [T, k] int32, different in each row: any; some more than others; the same ones; or some missing."""
    scores = make.normal(T, N, dtype=torch.float32)
    if routing == "skewed":
        scores += 1.5 * torch.linspace(2, -2, N, device=make.device)
    elif routing == "collapsed":
        scores[:] = torch.arange(N, device=make.device)
    chosen = scores.topk(k, -1).indices.to(torch.int32)
    return chosen.masked_fill(make.integers(0, 3, T, k) == 0, -1) if routing == "some_none" else chosen


def _case(
    T: int, N: int, k: int, D: int, F: int, routing: Routing = "random", biases: bool = False,
    size: Literal["small", "real"] = "small", encoding: str = "", rank: int = 0, residual: bool = False,
    norm: bool | Literal["wide"] = False, **more: Any,
) -> Case:  # fmt: skip
    def inputs(make: Maker) -> dict[str, Any]:
        parts = parts_of(more.get("activation", "silu"))
        encoded = encoded_experts(make, encoding, N, D, F, parts) if encoding else {}
        return {
            "x_TD": make.normal(T, D),
            "gate_up_N2FD": make.normal(N, parts * F, D, scale=D**-0.5),
            "down_NDF": make.normal(N, D, F, scale=F**-0.5),
            "weights_TA": torch.softmax(make.normal(T, k, dtype=torch.float32), -1),
            "experts_TA": choose(make, T, N, k, routing),
            "gate_up_bias_N2F": make.normal(N, parts * F, scale=0.3) if biases else None,
            "down_bias_ND": make.normal(N, D, scale=0.3) if biases else None,
            **encoded,
            **(lora_tables(make, T, N, D, F, rank, parts=parts) if rank else {}),
            "residual_TD": make.normal(T, D) if residual else None,
            "norm_D": make.normal(D, dtype=torch.float32 if norm == "wide" else None) if norm else None,
            "eps": 1e-6 if norm else 0.0,
            **more,
        }

    said = [routing, *(str(v) for v in more.values()), *["bias"] * biases, *[encoding] * bool(encoding)]
    said += [f"r{rank}"] * bool(rank) + ["residual"] * residual + ["norm"] * bool(norm) + ["wide"] * (norm == "wide")
    name = "_".join([f"T{T}_N{N}_k{k}_D{D}_F{F}", *said])
    bucket = Bucket("mixed" if T > 64 else "decode", T, T)
    return Case(name, inputs, _ROUNDED if rank or residual else _TOLERANCE, _REASON, bucket, size)


def lora_tables(
    make: Maker, T: int, N: int, D: int, F: int, rank: int, adapters: int = 3, parts: int = 2
) -> dict[str, Any]:
    """Arguments: adapters of a step's tokens; some tokens have none, and entry 0 is never read. parts: matrices of F
    rows in the first product."""
    L = adapters + 1
    made = {
        "gate_up_lora_a_LNRD": make.normal(L, N, parts * rank, D, scale=D**-0.5),
        "gate_up_lora_b_LNrO": make.normal(L, N, rank, parts * F, scale=rank**-0.5),
        "down_lora_a_LNrF": make.normal(L, N, rank, F, scale=F**-0.5),
        "down_lora_b_LNrD": make.normal(L, N, rank, D, scale=rank**-0.5),
    }
    for table in made.values():
        table[0] = float("nan")
    return {**made, "adapter_ids_T": make.integers(0, L, T)}


def encoded_experts(make: Maker, encoding: str, N: int, D: int, F: int, parts: int = 2) -> dict[str, Any]:
    """Arguments: random encoded matrices. encoding: as for `encoded`. parts: as for `lora_tables`."""
    found: dict[str, Any] = {}
    for stack, letters, out, inner in (("gate_up", "2F", parts * F, D), ("down", "D", D, F)):
        one = encoded(make, encoding, N * out, inner)
        weight, scales, zeros = (one[n] for n in ("weight_OI", "scales_GO", "zeros_GO"))
        assert isinstance(weight, torch.Tensor)
        found[f"{stack}_N{letters}{'F' if stack == 'down' else 'D'}"] = weight.view(N, out, -1)
        for name, values in (("scales", scales), ("zeros", zeros)):
            if isinstance(values, torch.Tensor):
                found[f"{stack}_{name}_NG{letters}"] = values.view(-1, N, out).transpose(0, 1).contiguous()
        found |= {n: one[n] for n in ("form", "group")}
    return found


_CLAMPED: dict[str, Any] = {"activation": "clamped", "limit": 1.0}

CASES = (
    _case(1, 4, 1, 16, 24),
    _case(3, 8, 2, 40, 33),
    _case(7, 8, 2, 32, 16, "skewed", activation="gelu_tanh"),
    _case(9, 16, 4, 48, 40, "collapsed", biases=True, **_CLAMPED),
    _case(20, 60, 4, 24, 16, "some_none", biases=True),
    _case(1, 8, 4, 24, 40, "some_none", biases=True, **_CLAMPED),
    _case(90, 16, 4, 24, 16, "some_none", biases=True, **_CLAMPED),
    _case(70, 8, 2, 32, 48),
    _case(33, 512, 10, 16, 8),
    _case(300, 8, 2, 16, 8, "skewed"),
    _case(0, 8, 2, 32, 16),
    _case(70, 4, 2, 128, 64, "skewed"),
    _case(230, 4, 2, 64, 192, "some_none", biases=True, **_CLAMPED),
    _case(130, 4, 2, 64, 192, "collapsed", activation="relu2"),
    _case(1, 8, 2, 96, 64, biases=True, encoding="e2m1-32", **_CLAMPED),
    _case(1, 8, 3, 1312, 416, "some_none", encoding="e2m1-32", activation="gelu_tanh"),
    _case(5, 8, 2, 256, 160, "some_none", encoding="int4-zeros-64"),
    _case(20, 4, 2, 160, 96, "skewed", biases=True, encoding="e2m1-32", **_CLAMPED),
    _case(70, 8, 2, 160, 96, "skewed", biases=True, encoding="e2m1-32", **_CLAMPED),
    _case(9, 8, 2, 416, 224, "collapsed", encoding="e2m1-32"),
    _case(40, 6, 3, 288, 160, "some_none", biases=True, encoding="e2m1-32", activation="gelu_tanh"),
    _case(66, 4, 2, 128, 136, "some_none", encoding="float8-0"),
    _case(1, 4, 2, 40, 24, rank=4),
    _case(3, 8, 2, 32, 48, "some_none", rank=16),
    _case(9, 16, 4, 48, 40, "collapsed", biases=True, rank=3, **_CLAMPED),
    _case(70, 8, 2, 32, 48, "skewed", rank=20),
    _case(300, 8, 2, 16, 8, rank=8),
    _case(2, 8, 2, 96, 64, biases=True, encoding="e2m1-32", rank=8, **_CLAMPED),
    _case(66, 4, 2, 128, 136, "some_none", encoding="float8-0", rank=16),
    _case(1, 8, 3, 40, 24, "some_none", biases=True, activation="relu2"),
    _case(5, 8, 2, 40, 72, "some_none", biases=True, activation="relu2"),
    _case(70, 8, 2, 40, 72, "skewed", biases=True, activation="relu2"),
    _case(70, 8, 2, 32, 200, activation="relu2"),
    _case(1, 8, 2, 160, 96, biases=True, encoding="e2m1-32", activation="relu2"),
    _case(20, 4, 2, 160, 96, "skewed", encoding="e2m1-32", activation="relu2"),
    _case(70, 4, 2, 128, 136, "some_none", encoding="float8-0", activation="relu2"),
    _case(3, 8, 2, 32, 48, "some_none", rank=16, activation="relu2"),
    _case(70, 8, 2, 32, 48, "skewed", rank=20, activation="relu2"),
    _case(1, 8, 4, 40, 24, residual=True, norm=True, activation="relu2"),
    *(_case(T, 32, 8, 2048, 768, size="real", rank=16) for T in (1, 8, 64, 1024)),
    _case(0, 8, 2, 32, 16, residual=True),
    _case(1, 8, 4, 40, 24, residual=True, norm=True),
    _case(1, 8, 4, 40, 24, residual=True, norm="wide"),
    _case(1, 8, 4, 24, 40, residual=True, norm=True, biases=True, **_CLAMPED),
    _case(1, 8, 2, 24, 40, residual=True, biases=True, **_CLAMPED),
    _case(5, 8, 2, 24, 16, residual=True, biases=True),
    _case(70, 8, 2, 24, 16, residual=True),
    _case(1, 8, 2, 24, 16, residual=True, norm=True, rank=4),
    _case(5, 8, 2, 24, 16, residual=True, rank=4),
    _case(70, 8, 2, 24, 16, residual=True, rank=20),
    _case(1, 6, 3, 160, 96, residual=True, biases=True, encoding="e2m1-32", **_CLAMPED),
    _case(20, 6, 3, 160, 96, residual=True, biases=True, encoding="e2m1-32", **_CLAMPED),
    *(_case(T, 128, 8, 2048, 768, residual=True, norm=T == 1, size="real") for T in (1, 32, 1024)),
    # Qwen3-30B-A3B, Mixtral 8x7B, GPT-OSS 20B, and at last Nemotron 3 Nano.
    *(_case(T, 128, 8, 2048, 768, size="real") for T in (1, 8, 32, 64, 128, 1024, 8192)),
    *(_case(T, 128, 8, 2048, 768, "skewed", size="real") for T in (32, 1024)),
    *(_case(T, 8, 2, 4096, 14336, size="real") for T in (1, 32, 1024)),
    *(_case(T, 32, 4, 2880, 2880, biases=True, size="real", activation="clamped", limit=7.0) for T in (1, 32, 1024)),
    *(
        _case(T, 32, 4, 2880, 2880, biases=True, size="real", encoding="e2m1-32", activation="clamped", limit=7.0)
        for T in (1, 32, 128, 1024)
    ),
    *(_case(T, 128, 6, 2688, 1856, size="real", activation="relu2") for T in (1, 32, 1024)),
)
