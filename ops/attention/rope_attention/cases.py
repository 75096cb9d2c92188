"""Inputs for rope_attention: batches of `paged_attention` with whole, partial and normalized rotations."""

from __future__ import annotations

import dataclasses

from graphllm.ir.testing import Case, Maker
from graphllm.ops.attention.paged_attention.cases import CASES as ATTENTION

_TOLERANCE = {"float32": 4e-6, "bfloat16": 2e-2, "float16": 2e-3}
_REASON = "as `paged_attention`; norm and rotation round queries and keys up to four times more"
# A key between two entries of 8 bits that is rounded otherwise is off by an eighth; so many are in the ragged cases.
_TOLERANCE_FP8 = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}
_REASON_FP8 = _REASON + ", and may fall to the other side of a tie in 8 bits"


def _case(batch: str, rotated: float = 1.0, norm: bool = False) -> Case:
    """The batch of that name; rotated: share of the head that rotates."""
    tolerance, reason = (_TOLERANCE, _REASON) if "fp8" not in batch else (_TOLERANCE_FP8, _REASON_FP8)
    (base,) = (c for c in ATTENTION if c.name == batch)

    def inputs(make: Maker) -> dict[str, object]:
        args = base.inputs(make)
        T, _, E = args["q_THE"].shape
        F = max(1, int(E * rotated) // 2)
        angles = make.normal(T, F).float()
        tables = {"cos_TF": angles.cos(), "sin_TF": angles.sin()}
        if make.dtype.itemsize == 8:
            tables = {name: t.double() for name, t in tables.items()}
        norms = {"q_norm_E": make.normal(E), "k_norm_E": make.normal(E), "eps": 1e-6} if norm else {}
        return args | tables | norms

    name = f"{batch}_rotate{rotated:g}" + ("_norm" if norm else "")
    return dataclasses.replace(base, name=name, inputs=inputs, tolerance=tolerance, reason=reason)


CASES = (
    _case("decode_ragged"),
    _case("decode_group7_fused", norm=True),
    _case("decode_mqa", 0.5, norm=True),
    _case("decode_long", norm=True),
    _case("decode_empty", 0.5),
    _case("decode_nothing"),
    _case("decode_fp8", norm=True),
    _case("verify_ragged"),
    _case("verify_group7_head80", 0.5, norm=True),
    _case("verify_fp8", norm=True),
    _case("mixed_fp8"),
    _case("prompt", norm=True),
    _case("mixed", norm=True),
    _case("mixed_mha_head80", 0.25),
    _case("mixed_window"),
    _case("mixed_head128_chunks", norm=True),
    _case("mixed_window_chunks"),
    _case("decode_sinks_ranges"),
    _case("mixed_sinks"),
    *(_case(f"decode_8b_b{S}_ctx512") for S in (1, 32, 128)),
    *(_case(f"decode_06b_b{S}_ctx384", norm=True) for S in (1, 64, 256)),
    _case("prefill_8b_1x8192"),
    _case("mixed_8b_128x1024_2x1024"),
    _case("verify_8b_b1_ctx4096"),
    _case("verify_8b_b32_ctx4096"),
    _case("decode_8b_b32_ctx4096"),
    _case("verify_tree", norm=True),
    _case("mixed_tree"),
)
