"""Inputs for gguf_embedding: plain and scaled rows, repeated ids, no tokens."""

from __future__ import annotations

from typing import Any, Literal

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker
from graphllm.ops.encodings.gguf_inputs import random_tiles

_TOLERANCE = {"float32": 1e-7, "bfloat16": 4e-3, "float16": 6e-4}
_REASON = "rows are rounded to the dtype, the scale too, then their product (bf16 keeps 8 bits, fp16 11)"


def _case(T: int, V: int, D: int, kind: str, scale: float = 1.0, size: Literal["small", "real"] = "small") -> Case:
    def inputs(make: Maker) -> dict[str, Any]:
        return {
            "token_ids_T": make.integers(0, V, T),
            "tiles_BGN": random_tiles(make, kind, V, D, 1 / 32),
            "kind": kind,
            "dtype": str(make.dtype).removeprefix("torch."),
            "scale": scale,
        }

    name = f"{kind}_T{T}_V{V}_D{D}" + (f"_scale{scale:.4g}" if scale != 1.0 else "")
    return Case(name, inputs, _TOLERANCE, _REASON, Bucket("mixed" if T > 64 else "decode", T, T), size)


CASES = (
    _case(1, 50, 32, "q8_0"),
    _case(7, 40, 256, "q6_k", scale=256**0.5),
    _case(65, 16, 512, "q4_k"),
    _case(0, 16, 32, "q5_0"),
    *(_case(T, 151936, 1024, kind, size="real") for kind in ("q8_0", "q6_k") for T in (1, 64, 1024)),
)
