"""Inputs for add_embedding_lora: tokens of several adapters, of one and of none; ranks of any size; scaled rows."""

from __future__ import annotations

from typing import Any, Literal

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker

_TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}
_REASON = "the sum is rounded to the dtype"


def _case(
    T: int, V: int, D: int, rank: int, adapters: int = 3, scale: float = 1.0, ids: str = "mixed",
    size: Literal["small", "real"] = "small",
) -> Case:  # fmt: skip
    def inputs(make: Maker) -> dict[str, Any]:
        a, b = make.normal(adapters + 1, V, rank), make.normal(adapters + 1, rank, D, scale=rank**-0.5)
        a[0], b[0] = float("nan"), float("nan")  # never read
        low, high = {"mixed": (0, adapters + 1), "none": (0, 1), "one": (2, 3)}[ids]
        return {
            "y_TD": make.normal(T, D),
            "token_ids_T": make.integers(0, V, T),
            "a_LVr": a,
            "b_LrD": b,
            "adapter_ids_T": make.integers(low, high, T),
            "scale": scale,
        }

    name = f"T{T}_V{V}_D{D}_r{rank}_L{adapters}_{ids}" + (f"_by{scale:g}" if scale != 1 else "")
    return Case(name, inputs, _TOLERANCE, _REASON, Bucket("mixed" if T > 64 else "decode", T, T), size)


CASES = (
    _case(1, 40, 48, 16, ids="one"),
    _case(7, 33, 72, 3, scale=8.5),
    _case(5, 20, 300, 20, ids="none"),
    _case(70, 50, 64, 8, adapters=1),
    _case(0, 20, 32, 4),
    *(_case(T, 151_936, 2048, 16, 8, size="real") for T in (1, 64, 1024)),
)
