"""Inputs for linear_add_norm: with and without bias, odd sizes, real layer shapes."""

from __future__ import annotations

from typing import Literal

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker
from graphllm.ops.encodings.encoded_weights import encoded
from graphllm.ops.gemm.fused_linear.cases import adapters

_TOLERANCE = {"float32": 4e-6, "bfloat16": 1e-2, "float16": 1.5e-3}
_REASON = "float32 accumulation in another order; sum and norm are rounded to the dtype up to three times"


def _case(
    T: int,
    out: int,
    inner: int,
    bias: bool = False,
    size: Literal["small", "real"] = "small",
    encoding: str = "",
    rank: int = 0,
    wide: bool = False,
) -> Case:
    def inputs(make: Maker) -> dict[str, object]:
        return {
            "x_TI": make.normal(T, inner),
            "weight_OI": make.normal(out, inner, scale=inner**-0.5),
            **(encoded(make, encoding, out, inner) if encoding else {}),
            "residual_TO": make.normal(T, out),
            "norm_O": make.normal(out, dtype=torch.float32 if wide else None),
            "eps": 1e-5,
            "bias_O": make.normal(out) if bias else None,
            **(adapters(make, T, inner, (out,), rank, 8) if rank else {}),
        }

    name = f"T{T}_O{out}_I{inner}" + ("_bias" if bias else "") + (f"_{encoding}" if encoding else "")
    name += (f"_r{rank}" if rank else "") + ("_wide" if wide else "")
    return Case(name, inputs, _TOLERANCE, _REASON, Bucket("mixed" if T > 64 else "decode", T, T), size)


CASES = (
    _case(0, 16, 32),
    _case(1, 48, 32),
    _case(3, 40, 96, bias=True),
    _case(17, 80, 520),
    _case(17, 80, 520, wide=True),
    _case(35, 33, 264, bias=True),
    _case(260, 72, 1032, bias=True),
    _case(70, 40, 1024),
    _case(260, 40, 2048),
    _case(17, 40, 256, bias=True, encoding="float8-0"),
    _case(1, 48, 768, bias=True, encoding="int4-zeros-128"),
    _case(3, 48, 528, encoding="int4-zeros-128"),
    _case(33, 48, 1792, bias=True, encoding="int4-zeros-128"),
    _case(3, 40, 96, bias=True, rank=16),
    _case(35, 72, 1032, rank=5),
    _case(17, 40, 256, encoding="float8-0", rank=16),
    *(_case(T, 4096, inner, size="real", rank=16) for T in (16, 64, 256) for inner in (4096, 14336)),
    *(_case(T, *shape, size="real") for T in (16, 64, 256)
      for shape in ((4096, 4096), (4096, 14336), (1024, 2048), (1024, 3072))),
)  # fmt: skip
