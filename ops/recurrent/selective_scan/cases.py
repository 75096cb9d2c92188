"""Inputs for selective_scan: decode and prompts around the sizes of tiles, ragged mixes, states of several versions,
extreme step sizes, and the shapes of Mamba-2.8B."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker
from graphllm.ops.recurrent.slot_cases import STEPS, Step, own_entries, owned_rows

_TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 6e-4}
_REASON = (
    "float32 recurrence with exp2 of a float32 exponent, whose error grows with the exponent; one rounding of the "
    "result to the dtype (Triton's interpreter cuts where a GPU rounds)"
)


def _case(
    name: str,
    step: Step,
    D: int = 40,
    N: int = 16,
    *,
    dt: Sequence[float] = (),
    skip: bool = True,
    bias: bool = True,
    bucket: Bucket | None = None,
    state: torch.dtype = torch.float32,
    size: Literal["small", "real"] = "small",
) -> Case:
    """One case. dt: what step sizes are before softplus, by turns; else drawn as those of trained models. skip, bias:
    whether D and dt_bias are given. state: its dtype."""
    T, V = step.rows, step.versions

    def inputs(make: Maker) -> dict[str, Any]:
        # All states of a slot lie side by side: here with others before and after.
        slot = make.normal(step.entries, 2 * V + 1, D, N, dtype=state)
        projected_TM = make.normal(T, 8 + 2 * N)
        dt_TD = make.normal(T, D, scale=0.7)
        if dt:
            dt_TD = dt_TD + make.tensor([dt[i % len(dt)] for i in range(T * D)], make.dtype).view(T, D)
        return {
            "x_TD": make.normal(T, D), "dt_TD": dt_TD,
            "A_DN": -make.normal(D, N, scale=0.7, dtype=torch.float32).exp(),
            "B_TN": projected_TM[:, 8 : 8 + N], "C_TN": projected_TM[:, 8 + N :], "state": slot[:, 1 : 1 + 2 * V : 2],
            **step.arguments(make), "D_D": make.normal(D, dtype=torch.float32) if skip else None,
            "dt_bias_D": make.normal(D, dtype=torch.float32) - (0 if dt else 3) if bias else None,
        }  # fmt: skip

    chosen = bucket or step.bucket
    tolerance = _TOLERANCE if state == torch.float32 else dict.fromkeys(_TOLERANCE, 8e-3)  # of the state's own rounding
    return Case(name, inputs, tolerance, _REASON, chosen, size, specified=owned_rows, written=own_entries)


CASES = (
    *(_case(step.name, step) for step in STEPS),
    _case("decode_bfloat16", Step([1] * 3), state=torch.bfloat16),
    _case("prompts_bfloat16", Step([9, 1]), state=torch.bfloat16),
    _case("decode_N4", Step([1] * 7), 40, 4),
    _case("decode_16", Step([1] * 16), 90),
    _case("decode_D33_plain", Step([1, 1]), 33, skip=False, bias=False),
    _case("decode_D19_N24", Step([1, 1, 1]), 19, 24, bias=False),
    _case("verify_N24", Step([4, 4], versions=4), 17, 24, skip=False),
    _case("verify_four", Step([3, 1, 2, 3], versions=3), 24),
    _case("no_tokens", Step([]), 32, bucket=Bucket("mixed", 0, 8)),
    _case("prompt_64_D24", Step([64]), 24),
    _case("prompt_130_N4", Step([130]), 20, 4, skip=False),
    _case("prompt_65_N24", Step([65]), 23, 24, bias=False),
    _case("ragged", Step([1, 1, 17, 64, 2, 31], pad=4), 64),
    _case("dt_extreme", Step([40, 1, 3]), 48, dt=(-30.0, 30.0, 0.0, -10.0, 10.0)),
    _case("dt_large", Step([20, 1]), 32, dt=(30.0,), bias=False),
    _case("dt_small", Step([20, 1]), 32, dt=(-30.0,), skip=False),
    _case("mamba_2b8_decode_1", Step([1]), 5120, size="real"),
    _case("mamba_2b8_decode_64", Step([1] * 64), 5120, size="real"),
    _case("mamba_2b8_prefill_2048", Step([2048]), 5120, size="real"),
)
