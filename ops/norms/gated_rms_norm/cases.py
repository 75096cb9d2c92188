"""Inputs for gated_rms_norm: both orders, one and several groups, a weight for a row and for a group."""

from __future__ import annotations

from typing import Any, Literal

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker

_TOLERANCE = {"float32": 1e-6, "bfloat16": 8e-3, "float16": 1e-3}
_REASON = "the normalized row and the result are rounded to the dtype"


def _case(
    T: int, D: int, groups: int, gate_first: bool, each: bool = False, size: Literal["small", "real"] = "small"
) -> Case:
    def inputs(make: Maker) -> dict[str, Any]:
        return {
            "x_TD": make.normal(T, D),
            "gate_TD": make.normal(T, 2 * D)[:, D:],
            "weight_E": make.normal(D // groups if each else D),
            "groups": groups,
            "eps": 1e-5,
            "gate_first": gate_first,
        }

    name = f"T{T}_D{D}_G{groups}" + ("_first" if gate_first else "") + ("_each" if each else "")
    return Case(name, inputs, _TOLERANCE, _REASON, Bucket("mixed" if T > 64 else "decode", T, T), size)


CASES = (
    _case(1, 48, 1, True),
    _case(7, 96, 4, True),
    _case(66, 40, 5, False, each=True),
    _case(3, 32, 2, False),
    _case(0, 16, 1, True),
    _case(64, 8192, 8, True, size="real"),
    _case(64, 4096, 32, False, each=True, size="real"),
)
