"""Inputs for moe_route: every scoring, few and many experts, groups, equal logits, no tokens."""

from __future__ import annotations

from typing import Any, Literal

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker

_TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-6}
_REASON = "scores in float32; the numbers of experts are exact"


def _case(
    T: int,
    N: int,
    k: int,
    name: str = "softmax",
    size: Literal["small", "real"] = "small",
    bias: bool = False,
    **more: Any,
) -> Case:
    def inputs(make: Maker) -> dict[str, Any]:
        given = {"logits_TN": make.normal(T, N, scale=2.0), "k": k, **more}
        if name == "equal":
            given["logits_TN"] = make.integers(0, 2, T, N).to(make.dtype)
        if bias:
            given["bias_N"] = make.normal(N, scale=0.3).float()
        if name == "shared_gated":  # both are columns of one product
            given["logits_TN"], given["share_T1"] = make.normal(T, N + 1, scale=2.0).split((N, 1), 1)
        return given

    bucket = Bucket("mixed" if T > 64 else "decode", T, T)
    return Case(f"{name}_T{T}_N{N}_k{k}", inputs, _TOLERANCE, _REASON, bucket, size)


_V3: dict[str, Any] = {"scoring": "sigmoid", "bias": True, "groups": 8, "kept_groups": 4, "scale": 2.5}

CASES = (
    _case(1, 4, 1),
    _case(5, 8, 2),
    _case(7, 60, 4, "softmax_not_renormalized", renormalize=False),
    _case(70, 32, 6, "softmax_groups", groups=4, kept_groups=2, renormalize=False, scale=16.0),
    _case(6, 64, 8, "sigmoid_groups", **_V3),
    _case(6, 16, 2, "sparsemixer", scoring="sparsemixer", jitter=0.01),
    _case(6, 16, 2, "sparsemixer_wide", scoring="sparsemixer", jitter=0.5),
    _case(9, 512, 10),
    _case(9, 16, 4, "equal"),
    _case(9, 60, 4, "shared_gated"),
    _case(9, 64, 6, "shared", shared=3, renormalize=False),
    _case(9, 8, 2, "shared_one", shared=1, scoring="sigmoid", scale=2.5),
    _case(0, 8, 2),
    *(_case(T, N, k, size="real") for T in (1, 32, 1024) for N, k in ((8, 2), (32, 4), (128, 8))),
    *(_case(T, 256, 8, "sigmoid_groups", size="real", **_V3) for T in (1, 32, 1024)),
)
