"""Inputs for residual_moe: those of fused_moe with a residual, and with a norm for one token."""

from __future__ import annotations

from typing import Any, Literal

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker
from graphllm.ops.moe.fused_moe.cases import choose, encoded_experts, lora_tables

_TOLERANCE = {"float32": 2e-6, "bfloat16": 1.6e-2, "float16": 2e-3}
_REASON = "normalized rows, hidden numbers, what each expert gives and the sum may be rounded to the dtype"


def _case(
    T: int, N: int, k: int, D: int, F: int, norm: bool = False, biases: bool = False,
    size: Literal["small", "real"] = "small", rank: int = 0, encoding: str = "", **more: Any,
) -> Case:  # fmt: skip
    def inputs(make: Maker) -> dict[str, Any]:
        return {
            "residual_TD": make.normal(T, D),
            "x_TD": make.normal(T, D),
            "gate_up_N2FD": make.normal(N, 2 * F, D, scale=D**-0.5),
            "down_NDF": make.normal(N, D, F, scale=F**-0.5),
            "weights_TA": make.normal(T, k, dtype=make.dtype).float().softmax(-1),
            "experts_TA": choose(make, T, N, k, "random"),
            "gate_up_bias_N2F": make.normal(N, 2 * F, scale=0.3) if biases else None,
            "down_bias_ND": make.normal(N, D, scale=0.3) if biases else None,
            "norm_D": make.normal(D) if norm else None,
            "eps": 1e-6 if norm else 0.0,
            **(lora_tables(make, T, N, D, F, rank) if rank else {}),
            **(encoded_experts(make, encoding, N, D, F) if encoding else {}),
            **more,
        }

    name = f"T{T}_N{N}_k{k}_D{D}_F{F}" + "_norm" * norm + "_biases" * biases + f"_r{rank}" * bool(rank)
    name += f"_{encoding}" * bool(encoding)
    return Case(name, inputs, _TOLERANCE, _REASON, Bucket("mixed" if T > 64 else "decode", T, T), size)


_CLAMPED: dict[str, Any] = {"activation": "clamped", "limit": 1.0}

CASES = (
    _case(0, 8, 2, 32, 16),
    _case(1, 8, 4, 40, 24, norm=True),
    _case(1, 8, 4, 24, 40, norm=True, biases=True, **_CLAMPED),
    _case(1, 8, 2, 24, 40, biases=True, **_CLAMPED),
    _case(5, 8, 2, 24, 16, biases=True),
    _case(70, 8, 2, 24, 16),
    _case(1, 8, 2, 24, 16, norm=True, rank=4),
    _case(5, 8, 2, 24, 16, rank=4),
    _case(70, 8, 2, 24, 16, rank=20),
    _case(1, 6, 3, 160, 96, biases=True, encoding="e2m1-32", **_CLAMPED),
    _case(20, 6, 3, 160, 96, biases=True, encoding="e2m1-32", **_CLAMPED),
    *(_case(T, 128, 8, 2048, 768, norm=T == 1, size="real") for T in (1, 32, 1024)),
)
