"""Inputs for causal_conv: one token a sequence, prompts, mixed steps, versions; rows as slices of a projection."""

from __future__ import annotations

from typing import Any, Literal

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker
from graphllm.ops.recurrent.slot_cases import STEPS, Step, own_entries, owned_rows

_TOLERANCE = {"float32": 1e-6, "bfloat16": 8e-3, "float16": 5e-4}
_REASON = (
    "float32 sums of W products and silu; one rounding of the result to the dtype "
    "(Triton's interpreter cuts where a GPU rounds)"
)


def _case(
    step: Step,
    D: int = 40,
    W: int = 4,
    bias: bool = True,
    activation: str = "silu",
    bucket: Bucket | None = None,
    size: Literal["small", "real"] = "small",
) -> Case:
    def inputs(make: Maker) -> dict[str, Any]:
        return {
            "x_TD": make.normal(step.rows, D + 24)[:, 8 : 8 + D],
            "weight_DW": make.normal(D, W),
            "state": make.normal(step.entries, step.versions, W - 1, D),
            **step.arguments(make),
            "bias_D": make.normal(D) if bias else None,
            "activation": activation,
        }

    name = f"{step.name}_D{D}_W{W}" + ("_bias" if bias else "") + (f"_{activation}" if activation else "")
    chosen = bucket or step.bucket
    return Case(name, inputs, _TOLERANCE, _REASON, chosen, size, specified=owned_rows, written=own_entries)


CASES = (
    *(_case(step) for step in STEPS),
    _case(Step([1, 5, 2]), D=64, W=3, bias=False, activation=""),
    _case(Step([9, 1]), D=33, W=2),
    _case(Step([1, 12], versions=2), D=16, W=7, bias=False),
    _case(Step([1, 0] * 65 + [33, 40]), D=16),
    _case(Step([]), bucket=Bucket("mixed", 0, 8)),
    _case(Step([1] * 64), D=8192, bias=False, size="real"),
    _case(Step([2048]), D=8192, bias=False, size="real"),
)
