"""Inputs for record_drafts: one and several sequences, a full row of drafts, positions at the end."""

from __future__ import annotations

from typing import Any

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker


def _case(S: int, K: int, place: int, J: int = 1, last_position: int = 90) -> Case:
    N = S + 3

    def inputs(make: Maker) -> dict[str, Any]:
        order = torch.randperm(N - 1, generator=make.generator, device=make.generator.device)[:S]
        return {
            "tokens_SJ": make.integers(0, 99, S, J), "positions_S": make.integers(0, 99, S),
            "places_S": make.tensor([place] * S, torch.int32), "slots_S": make.tensor(order.tolist(), torch.int32),
            "drafts_NK": make.integers(0, 99, N, K), "count_N": make.integers(0, 3, N),
            "token_N": make.integers(0, 99, N), "position_N": make.integers(0, 99, N),
            "last_position": last_position,
        }  # fmt: skip

    tolerance = {"float32": 0.0, "bfloat16": 0.0, "float16": 0.0}
    bucket = Bucket("decode", S, S)
    return Case(f"S{S}_K{K}_place{place}_J{J}", inputs, tolerance, "numbers are copied", bucket)


CASES = (
    _case(1, 1, 0),
    _case(4, 3, 1),
    _case(5, 3, 4),
    _case(3, 2, 1, 1, 10),
    _case(0, 3, 0),
    _case(2, 3, 0, 3),
    _case(3, 3, 1, 3),
)
