"""Inputs for ssd_scan: one token a sequence, prompts, mixed steps, versions, extreme steps; rows as slices."""

from __future__ import annotations

from typing import Any, Literal

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker
from graphllm.ops.recurrent.slot_cases import STEPS, Step, own_entries, owned_rows

_TOLERANCE = {"float32": 3e-6, "bfloat16": 8e-3, "float16": 1e-3}
_STATE = {torch.float32: 0.0, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of a state's own rounding
_REASON = (
    "float32 sums along a sequence, in another order in chunks; one rounding of the result to the dtype (Triton's "
    "interpreter cuts where a GPU rounds)"
)


def _case(
    step: Step,
    heads: tuple[int, int, int, int] = (4, 2, 24, 40),
    *,
    skip: bool = True,
    limits: tuple[float, float] = (0.0, 0.0),
    spread: float = 1.0,
    bucket: Bucket | None = None,
    state: torch.dtype = torch.float32,
    size: Literal["small", "real"] = "small",
) -> Case:
    """heads: H, G, P, N. skip: with D and a bias. spread: of dt before softplus. state: its dtype."""
    H, G, P, N = heads

    def inputs(make: Maker) -> dict[str, Any]:
        T = step.rows
        xBC = make.normal(T, H * P + 2 * G * N)
        x, B, C = xBC.split([H * P, G * N, G * N], 1)
        return {
            "x_THP": x.view(T, H, P),
            "dt_TH": make.normal(T, H, scale=spread),
            "A_H": -torch.exp(make.normal(H, dtype=torch.float32)),
            "B_TGN": B.view(T, G, N),
            "C_TGN": C.view(T, G, N),
            "state": make.normal(step.entries, step.versions, H, P, N, dtype=state),
            **step.arguments(make),
            "D_H": make.normal(H, dtype=torch.float32) if skip else None,
            "dt_bias_H": make.normal(H, dtype=torch.float32) if skip else None,
            "dt_min": limits[0],
            "dt_max": limits[1],
        }

    name = f"{step.name}_{H}x{P}x{N}_G{G}" + ("_skip" if skip else "") + (f"_spread{spread:g}" if spread != 1 else "")
    name += f"_{state}".replace("torch.", "") if state != torch.float32 else ""
    chosen = bucket or step.bucket
    tolerance = {dtype: max(t, _STATE[state]) for dtype, t in _TOLERANCE.items()}
    return Case(name, inputs, tolerance, _REASON, chosen, size, specified=owned_rows, written=own_entries)


CASES = (
    *(_case(step) for step in STEPS),
    _case(Step([1, 5, 2]), (3, 1, 16, 16), skip=False),
    _case(Step([1, 20, 1]), (2, 2, 64, 128), limits=(0.05, 0.5)),
    _case(Step([40, 3]), (4, 4, 8, 7), spread=30.0),
    _case(Step([130, 9]), (2, 1, 64, 64)),
    _case(Step([1, 64, 3, 1], pad=2), (4, 2, 64, 64), spread=30.0),
    _case(Step([1, 12, 70, 2], versions=3), (2, 2, 64, 64), skip=False),
    _case(Step([1, 1, 1], pad=1), state=torch.bfloat16),
    _case(Step([70, 1, 9]), (2, 2, 64, 64), state=torch.bfloat16),
    _case(Step([9, 2]), (2, 2, 64, 64), state=torch.float16),
    _case(Step([]), bucket=Bucket("mixed", 0, 8)),
    _case(Step([1] * 64), (128, 8, 64, 128), size="real"),
    _case(Step([1024]), (128, 8, 64, 128), size="real"),
)
