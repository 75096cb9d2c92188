"""Inputs for gguf_linear: every type, decode and prefill row counts, outputs that end inside a tile, bias, gate."""

from __future__ import annotations

from typing import Any, Literal

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker
from graphllm.ops.encodings.gguf_blocks import TILED
from graphllm.ops.encodings.gguf_inputs import random_tiles

_TOLERANCE = {"float32": 1.2e-2, "bfloat16": 1.3e-2, "float16": 1.2e-2}
_REASON = "kernels round x to a 127th of the largest of a group, which is 0.5 to 0.9 % of normal numbers"


def _case(
    T: int, out: int, inner: int, kind: str, bias: bool = False, gated: bool = False,
    size: Literal["small", "real"] = "small",
) -> Case:  # fmt: skip
    def inputs(make: Maker) -> dict[str, Any]:
        return {
            "x_TI": make.normal(T, inner),
            "tiles_BGN": random_tiles(make, kind, out, inner, inner**-0.5 / 32),
            "kind": kind,
            "rows": out,
            "bias_O": make.normal(out) if bias else None,
            "gated": gated,
        }

    name = f"{kind}_T{T}_O{out}_I{inner}" + ("_bias" if bias else "") + ("_gated" if gated else "")
    return Case(name, inputs, _TOLERANCE, _REASON, Bucket("mixed" if T > 64 else "decode", T, T), size)


_LAYERS = ((1152, 1024), (9728, 1024), (896, 4864), (151936, 1024))

CASES = (
    # Other types have tests of their own, which compile them once.
    _case(1, 48, 64, "q8_0"),
    _case(3, 33, 256, "q4_k", bias=True),
    _case(17, 80, 512, "q4_k"),
    _case(65, 40, 512, "q8_0", bias=True),
    _case(0, 16, 32, "q8_0"),
    _case(1, 64, 256, "q8_0", gated=True),
    _case(70, 96, 256, "q4_k", bias=True, gated=True),
    *(_case(T, *layer, kind, size="real") for kind in TILED for T in (1, 8, 128) for layer in _LAYERS),
)
