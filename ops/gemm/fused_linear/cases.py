"""Inputs for fused_linear: each fusion by itself and all together, one row and some, real layer shapes."""

from __future__ import annotations

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker
from graphllm.ops.encodings.encoded_weights import encoded
from graphllm.ops.lora.add_lora.cases import tables

_TOLERANCE = {"float32": 4e-6, "bfloat16": 1e-2, "float16": 1.5e-3}
_NORMED = {**_TOLERANCE, "bfloat16": 2e-2}  # Triton's interpreter cuts off what normalized rows lose, it does not round
_REASON = (
    "float32 accumulation in another order; the reference rounds to the dtype up to four times (bf16 keeps 8 bits)"
)


def adapters(make: Maker, T: int, inner: int, widths: tuple[int, ...], rank: int, count: int) -> dict[str, object]:
    """The arguments of `add_lora` for tokens of any of the adapters and of none."""
    made = tables(make, inner, widths, rank, count)
    return {**made, "adapter_ids_T": make.integers(0, count + 1, T), "widths": list(widths)}


def _case(
    T: int,
    out: int,
    inner: int,
    fused: str = "",
    size: str = "small",
    encoding: str = "",
    widths: tuple[int, ...] = (),
    rank: int = 16,
    count: int = 3,
) -> Case:
    def inputs(make: Maker) -> dict[str, object]:
        gated = "gate" in fused
        weight = encoded(make, encoding, out, inner) if encoding else {}
        return {
            "x_TI": make.normal(T, inner),
            "weight_OI": make.normal(out, inner, scale=inner**-0.5),
            **weight,
            "bias_O": make.normal(out) if "bias" in fused else None,
            "norm_I": make.normal(inner, dtype=torch.float32 if "wide" in fused else None) if "norm" in fused else None,
            "eps": 1e-5,
            "residual_TN": make.normal(T, out // 2 if gated else out) if "residual" in fused else None,
            "gated": gated,
            **(adapters(make, T, inner, widths, rank, count) if widths else {}),
        }

    name = "_".join(filter(None, (f"T{T}_O{out}_I{inner}", fused, encoding)))
    name += f"_{len(widths)}x{count}_r{rank}" if widths else ""
    tolerance = _NORMED if "norm" in fused else _TOLERANCE
    return Case(name, inputs, tolerance, _REASON, Bucket("mixed" if T > 64 else "decode", T, T), size)  # type: ignore[arg-type]


LAYERS = {
    "8B": (("qkv", 6144, 4096, "norm"), ("o", 4096, 4096, "residual"), ("gate_up", 28672, 4096, "norm_gate"),
           ("down", 4096, 14336, "residual")),
    "0.6B": (("qkv", 4096, 1024, "norm"), ("o", 1024, 2048, "residual"), ("gate_up", 6144, 1024, "norm_gate"),
             ("down", 1024, 3072, "residual")),
}  # fmt: skip

_PARTS = {"qkv": (4096, 1024, 1024), "gate_up": (14336, 14336)}

CASES = (
    _case(1, 48, 32),
    _case(1, 96, 160, "norm_bias_gate_residual"),
    _case(1, 96, 160, "wide_norm_residual"),
    _case(1, 40, 2056, "residual"),
    _case(0, 16, 32, "norm"),
    _case(3, 40, 96, "bias_residual"),
    _case(17, 80, 256, "norm_gate"),
    _case(5, 72, 520, "norm_bias_gate_residual"),
    _case(6, 72, 640, "bias_gate_residual"),
    _case(14, 40, 1536, "norm"),
    _case(5, 96, 1312, "norm_bias_gate_residual"),
    _case(16, 272, 2080, "norm_bias_residual"),
    _case(12, 208, 96, "bias_gate"),
    _case(7, 4240, 64, "norm_gate"),
    _case(10, 2168, 64, "residual"),
    _case(33, 33, 72, "norm"),
    _case(1, 72, 88, "gate"),
    _case(21, 104, 96, "bias_gate"),
    _case(40, 200, 136, "norm_bias_residual"),
    _case(64, 592, 264, "bias_gate"),
    _case(75, 1100, 520, "gate"),
    _case(130, 328, 648, "bias_residual"),
    _case(300, 144, 328, "norm_bias_gate"),
    _case(260, 80, 1048, "norm_bias_gate"),
    _case(270, 33, 88, "residual"),
    _case(70, 96, 1040, "norm_gate"),
    _case(1, 192, 256, "norm_gate", encoding="float8-0"),
    _case(3, 40, 272, "bias_residual", encoding="float8-0"),
    _case(5, 72, 528, "norm_gate", encoding="float8-128"),
    _case(17, 80, 256, encoding="int8-zeros-64"),
    _case(1, 96, 512, "norm_bias_gate_residual", encoding="int4-zeros-128"),
    _case(1, 64, 1536, "residual", encoding="int4-128"),
    _case(1, 32, 4352, "bias", encoding="int4-zeros-128"),
    _case(14, 96, 512, "norm_bias_gate", encoding="int4-zeros-128"),
    _case(20, 48, 320, "residual", encoding="int4-32"),
    _case(40, 176, 1024, "bias", encoding="int4-128"),
    _case(2, 40, 288, encoding="int4-0"),
    _case(33, 72, 528, "gate", encoding="int4-zeros-64"),
    _case(3, 48, 352, "residual", encoding="e2m1-32"),
    _case(1, 96, 64, "norm_bias_gate_residual", widths=(48, 48)),
    _case(1, 80, 2056, "norm", widths=(40, 24, 16), rank=5),
    _case(1, 48, 256, "residual", encoding="float8-0", widths=(48,), rank=33),
    _case(7, 80, 96, "norm_gate", widths=(40, 40), rank=24),
    _case(17, 72, 528, "residual", widths=(40, 32), count=5),
    _case(70, 96, 1040, "gate", widths=(96,), rank=64, count=1),
    _case(20, 48, 320, encoding="int4-32", widths=(16, 16, 16), count=6),
    _case(3, 48, 352, "residual", encoding="e2m1-32", widths=(48,), rank=8),
    *(
        _case(T, *layer[1:], size="real", widths=_PARTS.get(layer[0], layer[1:2]), count=8)
        for T in (1, 8, 16, 64, 256)
        for layer in LAYERS["8B"]
    ),
    *(_case(T, *layer[1:], size="real") for T in (1, 16, 64, 256) for layers in LAYERS.values() for layer in layers),
    *(
        _case(T, *layer[1:], size="real", encoding=e)
        for T in (1, 16, 64, 256)
        for layer in LAYERS["8B"]
        for e in ("float8-0", "int4-zeros-128", "e2m1-32")
    ),
)
