"""Inputs for quantize_rows: plain, normalized and gated rows, odd lengths, real layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker

_TOLERANCE = {"float32": 1e-2, "bfloat16": 6e-2, "float16": 2e-2}
_REASON = (
    "what is nearly between two codes may become either: by rounding to the dtype before, which changes some bytes"
)


def _bytes(output: torch.Tensor, args: Mapping[str, Any]) -> torch.Tensor:
    """The numbers of the codes, since one code more or less is a rounding error."""
    if output.dtype != torch.int16:
        return output
    return output.view(torch.uint8).view(torch.float8_e4m3fn).float()


def _case(T: int, inner: int, fused: str = "", size: Literal["small", "real"] = "small") -> Case:
    def inputs(make: Maker) -> dict[str, Any]:
        gated = fused == "gated"
        return {
            "x_TI": make.normal(T, inner * (2 if gated else 1)),
            "norm_I": make.normal(inner, dtype=torch.float32 if "wide" in fused else None) if "norm" in fused else None,
            "eps": 1e-5,
            "gated": gated,
        }

    name = f"T{T}_I{inner}" + f"_{fused}" * bool(fused)
    return Case(name, inputs, _TOLERANCE, _REASON, Bucket("mixed" if T > 64 else "decode", T, T), size, _bytes)


CASES = (
    _case(0, 128),
    _case(3, 200),
    _case(5, 256, "norm"),
    _case(5, 256, "wide_norm"),
    _case(2, 264, "gated"),
    *(_case(T, *shape, size="real") for T in (512, 8192) for shape in ((4096, "norm"), (14336, "gated"), (4096, ""))),
)
