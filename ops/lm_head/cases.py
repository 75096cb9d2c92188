"""Inputs for lm_head: plain and capped logits, odd vocabularies, no sequences."""

from __future__ import annotations

from typing import Any, Literal

from graphllm.config import Bucket
from graphllm.ir.cases import Case, Maker

_TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 1.5e-3}
_REASON = "float32 accumulation in another order, one rounding to the dtype; the cap rounds three times more"


def _case(S: int, V: int, D: int, softcap: float = 0.0, size: Literal["small", "real"] = "small") -> Case:
    def inputs(make: Maker) -> dict[str, Any]:
        weight_VD = make.normal(V, D, scale=4 * D**-0.5)
        return {"x_SD": make.normal(S, D), "weight_VD": weight_VD, "softcap": softcap}

    name = f"S{S}_V{V}_D{D}" + (f"_cap{softcap:g}" if softcap else "")
    return Case(name, inputs, _TOLERANCE, _REASON, Bucket("decode", S, S), size)


CASES = (
    _case(1, 65, 32),
    _case(5, 48, 24, softcap=6.0),
    _case(17, 130, 40),
    _case(0, 48, 32, softcap=30.0),
    *(_case(S, 151936, 896, size="real") for S in (1, 8, 64)),
    *(_case(S, 128256, 4096, size="real") for S in (1, 32, 256)),
    *(_case(S, 256000, 2304, softcap=30.0, size="real") for S in (1, 32)),
)
