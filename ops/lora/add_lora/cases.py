"""Inputs for add_lora: single and merged layers, ranks 1 to 256, tokens of several adapters, of one and of none."""

from __future__ import annotations

from typing import Any, Literal

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker

_TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}
_REASON = "x @ A.T and the sum are rounded to the dtype (bf16 keeps 8 bits, fp16 11)"


def tables(make: Maker, inner: int, widths: tuple[int, ...], rank: int, adapters: int) -> dict[str, torch.Tensor]:
    """A and B of the adapters, after entry 0, which is never read."""
    L = adapters + 1
    made = {
        "a_LRI": make.normal(L, len(widths) * rank, inner, scale=inner**-0.5),
        "b_LrO": make.normal(L, rank, sum(widths), scale=rank**-0.5),
    }
    for table in made.values():
        table[0] = float("nan")
    return made


def _case(
    T: int,
    inner: int,
    widths: tuple[int, ...],
    rank: int,
    adapters: int = 3,
    ids: str = "mixed",
    size: Literal["small", "real"] = "small",
) -> Case:
    def inputs(make: Maker) -> dict[str, Any]:
        made = tables(make, inner, widths, rank, adapters)
        mixed = make.integers(0, adapters + 1, T)
        drawn = {"mixed": mixed, "none": make.integers(0, 1, T), "one": make.integers(2, 3, T)}
        runs = torch.sort(mixed)[0]  # as of prompts
        return {
            "y_TO": make.normal(T, sum(widths)),
            "x_TI": make.normal(T, inner),
            **made,
            "adapter_ids_T": {**drawn, "runs": runs}[ids],
            "widths": list(widths),
        }

    name = f"T{T}_I{inner}_O{'+'.join(map(str, widths))}_r{rank}_L{adapters}" + (f"_{ids}" if ids != "mixed" else "")
    return Case(name, inputs, _TOLERANCE, _REASON, Bucket("mixed" if T > 64 else "decode", T, T), size)


_QKV, _GATE_UP = (4096, 1024, 1024), (14336, 14336)

CASES = (
    _case(1, 48, (40,), 16, ids="one"),
    _case(7, 72, (48, 24, 24), 8),
    _case(5, 33, (17,), 1),
    _case(3, 64, (80,), 256, adapters=1),
    _case(9, 96, (64, 64), 24, adapters=5),
    _case(6, 32, (32,), 16, ids="none"),
    _case(0, 32, (32,), 16),
    _case(70, 160, (96, 48, 48), 16, ids="runs"),
    _case(33, 128, (130,), 20),
    *(_case(T, 4096, widths, 16, 8, size="real") for T in (1, 8, 64) for widths in (_QKV, (4096,), _GATE_UP)),
    *(_case(T, 14336, (4096,), 16, 8, size="real") for T in (1, 8, 64)),
    *(_case(1024, 4096, widths, rank, 8, "runs", "real") for widths in (_QKV, _GATE_UP) for rank in (16, 64)),
    *(_case(T, 896, (896, 128, 128), 16, 4, size="real") for T in (1, 8, 64, 1024)),
    *(_case(T, 896, (4864, 4864), 16, 4, size="real") for T in (1, 8, 64, 1024)),
    *(_case(T, 4864, (896,), 16, 4, size="real") for T in (1, 8, 64, 1024)),
)
