"""Inputs for store_slots: one and several sequences, in any order."""

from __future__ import annotations

from typing import Any

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker


def _case(S: int, D: int) -> Case:
    N = S + 3

    def inputs(make: Maker) -> dict[str, Any]:
        order = torch.randperm(N - 1, generator=make.generator, device=make.generator.device)[:S]
        slots = make.tensor(order.tolist(), torch.int32)
        return {"rows_SD": make.normal(S, D), "slots_S": slots, "state_ND": make.normal(N, D)}

    tolerance = {"float32": 0.0, "bfloat16": 0.0, "float16": 0.0}
    return Case(f"S{S}_D{D}", inputs, tolerance, "numbers are copied", Bucket("decode", S, S))


CASES = (_case(1, 32), _case(5, 48), _case(0, 8))
