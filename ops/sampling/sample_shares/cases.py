"""Inputs for sample_shares, in a group of one, which has all tokens: every filter, no rows, a real vocabulary."""

from __future__ import annotations

from typing import Any, Literal

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker

_TOLERANCE = {"float32": 0.0, "bfloat16": 0.0, "float16": 0.0}
_REASON = "token ids are exact"
_FILTERS = ((0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.6, 20, 0.95, 0.0), (0.8, 0, 0.9, 0.0), (1.5, 0, 1.0, 0.05))


def _case(S: int, V: int, size: Literal["small", "real"] = "small") -> Case:
    rows = [_FILTERS[s % len(_FILTERS)] for s in range(S)]

    def inputs(make: Maker) -> dict[str, Any]:
        temperature, top_k, top_p, min_p = zip(*rows, strict=True) if rows else ((), (), (), ())
        return {
            "logits_SN": make.normal(S, V, scale=3.0),
            "temperature_S": make.tensor(temperature, torch.float32),
            "top_k_S": make.tensor(top_k, torch.int32),
            "top_p_S": make.tensor(top_p, torch.float32),
            "min_p_S": make.tensor(min_p, torch.float32),
            "seed_S": make.tensor([7 * s for s in range(S)], torch.int64),
            "sample_index_S": make.tensor(range(S), torch.int32),
            "ranks": 1,
            "width": V,
        }

    return Case(f"S{S}_V{V}", inputs, _TOLERANCE, _REASON, Bucket("mixed" if S > 64 else "decode", S, S), size)


CASES = (_case(1, 99), _case(7, 2051), _case(0, 64), _case(64, 64_128, size="real"))
