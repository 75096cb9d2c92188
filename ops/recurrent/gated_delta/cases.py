"""Inputs for gated_delta: one token a sequence, prompts, mixed steps, versions; grouped heads, odd sizes, both kinds of
gates and their extremes; rows as slices of a projection, states as slices of a wider entry."""

from __future__ import annotations

from typing import Any, Literal

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker
from graphllm.ops.recurrent.slot_cases import STEPS, Step, own_entries, owned_rows

_TOLERANCE = {"float32": 3e-6, "bfloat16": 4e-3, "float16": 5e-4}
_REASON = (
    "float32 sums of K products, carried from token to token; one rounding of the result to the dtype, of the state to "
    "its own, and in chunks of the factors of products, too "
    "(Triton's interpreter cuts where a GPU rounds)"
)


def _case(
    step: Step,
    sizes: tuple[int, int, int, int] = (1, 2, 24, 40),
    channels: bool = False,
    norm: bool = True,
    gate: float | None = None,
    narrow: bool = False,
    kept: torch.dtype = torch.float32,
    bucket: Bucket | None = None,
    size: Literal["small", "real"] = "small",
) -> Case:
    """One case. sizes: G, H, K and V. channels: gates of each channel. norm: by the op, else keys are short already.
    gate: all gates; None draws them. narrow: gates and beta have the dtype of the rows, not float32. kept: the dtype of
    the state."""
    G, H, K, V = sizes

    def inputs(make: Maker) -> dict[str, Any]:
        T, dtype = step.rows, make.dtype if narrow else torch.float32
        q, k, v = make.normal(T, 2 * G * K + H * V + 8)[:, 8:].split([G * K, G * K, H * V], 1)
        if not norm:
            k = (k * (0.7 * K**-0.5)).to(make.dtype)
        g = -make.normal(T, H, K, scale=0.5, dtype=dtype).abs() if channels else -make.normal(T, H, dtype=dtype).abs()
        wide = make.normal(step.entries, step.versions + 1, H, V, K, dtype=kept)  # beside other states
        return {
            "q_TGK": q.unflatten(1, (G, K)),
            "k_TGK": k.unflatten(1, (G, K)),
            "v_THV": v.unflatten(1, (H, V)),
            "g": g if gate is None else torch.full_like(g, gate),
            "beta_TH": make.normal(T, H, dtype=dtype).sigmoid(),
            "state": wide[:, : step.versions],
            **step.arguments(make),
            "scale": K**-0.5,
            "norm_eps": 1e-6 if norm else 0.0,
        }

    name = f"{step.name}_G{G}_H{H}_K{K}_V{V}" + ("_channels" if channels else "") + ("" if norm else "_short")
    name += ("" if gate is None else f"_g{gate:g}") + ("_narrow" if narrow else "")
    name += "" if kept == torch.float32 else f"_{kept}".replace("torch.", "")
    chosen, rounding = bucket or step.bucket, {torch.bfloat16: 4e-3, torch.float16: 5e-4}.get(kept, 0.0)
    tolerance = {dtype: max(error, rounding) for dtype, error in _TOLERANCE.items()}
    return Case(name, inputs, tolerance, _REASON, chosen, size, specified=owned_rows, written=own_entries)


_MIXED, _VERSIONS = Step([1, 19, 2, 0]), Step([1, 2, 6, 3], versions=3, pad=2)

CASES = (
    *(_case(step) for step in STEPS),
    _case(Step([64]), (2, 2, 16, 16)),
    _case(_MIXED, (1, 4, 32, 17)),
    _case(_MIXED, (2, 2, 40, 24), channels=True, norm=False),
    _case(_VERSIONS, (1, 4, 24, 33), channels=True),
    _case(_VERSIONS, (1, 1, 128, 36), norm=False, narrow=True),
    _case(_MIXED, (1, 1, 7, 5), narrow=True, channels=True),
    *(_case(Step([1, 21]), gate=gate, channels=channels) for gate in (0.0, -80.0) for channels in (False, True)),
    *(_case(_MIXED, kept=kept) for kept in (torch.bfloat16, torch.float16)),
    _case(Step([40, 1, 70, 0], pad=1), (1, 2, 32, 40)),
    _case(Step([1, 33, 2, 65], versions=2), (2, 2, 32, 24), norm=False, kept=torch.bfloat16),
    _case(Step([1, 70, 0], versions=2, pad=3), (1, 2, 128, 128)),
    _case(Step([65]), (1, 1, 128, 128), norm=False, kept=torch.bfloat16),
    _case(Step([1, 70, 0], versions=2, pad=3), (1, 2, 128, 128), channels=True),
    _case(Step([65]), (1, 1, 128, 128), channels=True, gate=-20.0, norm=False, kept=torch.bfloat16),
    _case(Step([]), bucket=Bucket("mixed", 0, 8)),
    _case(Step([1] * 64), (16, 32, 128, 128), size="real"),
    _case(Step([1] * 8), (16, 32, 128, 128), size="real"),
    _case(Step([1024]), (16, 32, 128, 128), size="real"),
    _case(Step([2048]), (16, 32, 128, 128), size="real"),
    *(_case(Step([8192]), (16, H, 128, 128), size="real") for H in (32, 64)),
    _case(Step([64]), (32, 32, 128, 128), channels=True, size="real"),
    _case(Step([2048]), (32, 32, 128, 128), channels=True, size="real"),
)
