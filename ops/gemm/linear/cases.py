"""Inputs for linear: decode and prefill row counts at small and at real layer shapes."""

from __future__ import annotations

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker
from graphllm.ops.encodings.encoded_weights import encoded

_TOLERANCE = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 6e-4}
_REASON = "float32 accumulation in another order, then one rounding to the dtype (bf16 keeps 8 bits, fp16 11)"


def _case(T: int, out: int, inner: int, bias: bool = False, size: str = "small", encoding: str = "") -> Case:
    def inputs(make: Maker) -> dict[str, object]:
        return {
            "x_TI": make.normal(T, inner),
            "weight_OI": make.normal(out, inner, scale=inner**-0.5),
            **(encoded(make, encoding, out, inner) if encoding else {}),
            "bias_O": make.normal(out) if bias else None,
        }

    name = f"T{T}_O{out}_I{inner}" + ("_bias" if bias else "") + (f"_{encoding}" if encoding else "")
    return Case(name, inputs, _TOLERANCE, _REASON, Bucket("mixed" if T > 64 else "decode", T, T), size)  # type: ignore[arg-type]


CASES = (
    _case(1, 48, 32),
    _case(3, 40, 96, bias=True),
    _case(17, 80, 64),
    _case(0, 16, 32),
    _case(65, 33, 72, bias=True),
    _case(34, 50, 90, bias=True),
    *(
        _case(3, 40, 160, encoding=e)
        for e in ("float8-0", "float8-128", "int8-zeros-64", "int4-zeros-64", "int4-32", "e2m1-32")
    ),
    *(_case(T, out, inner, size="real") for T in (1, 8, 64) for out, inner in ((1152, 896), (9728, 896), (896, 4864))),
    *(_case(T, out, inner, size="real") for T in (1, 32, 1024) for out, inner in ((6144, 4096), (28672, 4096))),
    *(_case(T, 151936, 896, size="real") for T in (1, 8, 64)),
    *(_case(T, 128256, 4096, size="real") for T in (1, 32, 256)),
)
