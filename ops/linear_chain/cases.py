"""Inputs for linear_chain: widths that are no powers of two, with and without a bias, real layers of small models."""

from __future__ import annotations

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker

_TOLERANCE = {"float32": 8e-6, "bfloat16": 3e-2, "float16": 4e-3}
_REASON = (
    "four products in a row with float32 accumulation in another order; the reference rounds to the dtype after each "
    "step (bf16 keeps 8 bits)"
)


def _case(
    name: str, attended: int, hidden: int, inner: int, out: int, bias: bool = False, size: str = "small", T: int = 1
) -> Case:
    """attended: entries of all heads. hidden: of the residual stream. inner: of the gated products. out: of queries,
    keys and values."""

    def inputs(make: Maker) -> dict[str, object]:
        return {
            "x_TA": make.normal(T, attended),
            "residual_TD": make.normal(T, hidden),
            "o_DA": make.normal(hidden, attended, scale=attended**-0.5),
            "norm_D": make.normal(hidden),
            "gate_up_2FD": make.normal(2 * inner, hidden, scale=hidden**-0.5),
            "down_DF": make.normal(hidden, inner, scale=inner**-0.5),
            "next_norm_D": make.normal(hidden),
            "qkv_QD": make.normal(out, hidden, scale=hidden**-0.5),
            "eps": 1e-6,
            "next_eps": 1e-5,
            "bias_Q": make.normal(out) if bias else None,
        }

    return Case(name, inputs, _TOLERANCE, _REASON, Bucket("decode", T, T), size)  # type: ignore[arg-type]


CASES = (
    _case("64", 64, 64, 96, 128),
    _case("odd_widths_bias", 120, 88, 264, 200, bias=True),
    _case("wide", 128, 520, 1100, 272),
    _case("none", 64, 64, 96, 128, T=0),
    _case("three_rows", 64, 64, 96, 128, T=3),
    _case("sixteen_rows_bias", 96, 160, 352, 224, bias=True, T=16),
    _case("forty_rows", 160, 96, 224, 208, T=40),
    _case("nine_rows", 256, 128, 512, 384, T=9),
    *(_case(f"qwen3-0.6b_T{T}", 2048, 1024, 3072, 4096, size="real", T=T) for T in (1, 4, 16, 64)),
    _case("qwen2.5-0.5b", 896, 896, 4864, 1152, bias=True, size="real"),
    _case("llama3.2-1b", 2048, 2048, 8192, 3072, size="real"),
    _case("qwen3-1.7b", 2048, 2048, 6144, 4096, size="real"),
)
