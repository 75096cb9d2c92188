"""Inputs for quant_moe: both formats, routing as in fused_moe, sizes that end inside a block and a group, biases."""

from __future__ import annotations

from typing import Any, Literal

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker
from graphllm.ops.gemm.quant_linear.cases import FORMATS
from graphllm.ops.moe.fused_moe.cases import Routing, choose, lora_tables
from graphllm.ops.moe.fused_moe.operands import parts_of

_TOLERANCE = {"float32": 2e-2, "bfloat16": 2.2e-2, "float16": 2e-2}
_REASON = "kernels round x, and then the hidden rows, to a 127th of the largest of a group, each 0.5 to 0.9 %"


def _case(
    T: int, N: int, k: int, D: int, F: int, fmt: str, routing: Routing = "random", biases: bool = False,
    size: Literal["small", "real"] = "small", rank: int = 0, **more: Any,
) -> Case:  # fmt: skip
    def inputs(make: Maker) -> dict[str, Any]:
        parts = parts_of(more.get("activation", "silu"))

        def stack(of: str, rows: int, inner: int) -> dict[str, Any]:
            bits, group, dtype, low, high = FORMATS[fmt]
            B, G, L = -(-rows // 16), -(-inner // group), group * bits // 32
            scale = inner**-0.5 / 2 ** (bits - 2)
            return {
                f"{of}_values_NBGLRQ": make.integers(low, high, N, B, G, L, 16, 4, dtype=dtype),
                f"{of}_scales_NBGR": make.normal(N, B, G, 16, scale=scale, dtype=torch.bfloat16),
            }

        return {
            "x_TD": make.normal(T, D),
            **stack("gate_up", parts * F, D),
            **stack("down", D, F),
            "weights_TA": torch.softmax(make.normal(T, k, dtype=torch.float32), -1),
            "experts_TA": choose(make, T, N, k, routing),
            "inner": F,
            "gate_up_bias_N2F": make.normal(N, parts * F, scale=0.3) if biases else None,
            "down_bias_ND": make.normal(N, D, scale=0.3) if biases else None,
            **(lora_tables(make, T, N, D, F, rank, parts=parts) if rank else {}),
            **more,
        }

    name = "_".join([fmt, f"T{T}_N{N}_k{k}_D{D}_F{F}", routing, *(str(v) for v in more.values()), *["bias"] * biases])
    name += f"_r{rank}" * bool(rank)
    bucket = Bucket("mixed" if T > 64 else "decode", T, T)
    return Case(name, inputs, _TOLERANCE, _REASON, bucket, size)


CASES = (
    *(_case(0, 8, 2, 32, 16, fmt) for fmt in FORMATS),
    *(_case(1, 4, 2, 72, 48, fmt) for fmt in FORMATS),
    *(_case(9, 16, 4, 40, 80, fmt, "collapsed", True, activation="clamped", limit=1.0) for fmt in FORMATS),
    *(_case(20, 60, 4, 24, 16, fmt, "some_none", True) for fmt in FORMATS),
    *(_case(70, 4, 2, 100, 48, fmt, "skewed", activation="gelu_tanh") for fmt in FORMATS),
    *(_case(300, 8, 2, 33, 32, fmt, "skewed", True) for fmt in FORMATS),
    *(_case(T, 4, 2, 72, 48, fmt, "some_none", True, rank=5) for T in (1, 9, 150) for fmt in FORMATS),
    *(_case(T, 4, 2, 72, 48, fmt, "some_none", activation="relu2") for T in (1, 9, 150) for fmt in FORMATS),
    *(_case(20, 4, 2, 72, 48, fmt, biases=True, rank=5, activation="relu2") for fmt in FORMATS),
    *(_case(T, 16, 2, 896, 4864, fmt, size="real") for T in (1, 8, 128) for fmt in FORMATS),
)
