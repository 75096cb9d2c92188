"""Inputs for place_experts: no copies, some, all of them of one expert; ranks with the first and the last slots."""

from __future__ import annotations

import random
from typing import Any, Literal

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker


def _case(
    T: int, N: int, ranks: int, rank: int, copies: tuple[int, ...] = (), size: Literal["small", "real"] = "small"
) -> Case:
    """copies: the experts that there is one more of each time they are named."""

    def inputs(make: Maker) -> dict[str, Any]:
        placement = [*range(N), *copies]
        random.Random(N).shuffle(placement)
        slots = sorted(range(len(placement)), key=placement.__getitem__)
        starts = [sum(expert < n for expert in placement) for n in range(N + 1)]
        count = len(placement) // ranks
        return {
            "experts_TA": make.integers(0, N, T, 2),
            "starts_M": make.tensor(starts, torch.int32),
            "slots_P": make.tensor(slots, torch.int32),
            "first": make.tensor([rank * count], torch.int32),
            "count": count,
        }

    name = f"T{T}_N{N}_rank{rank}of{ranks}_{len(copies)}more"
    bucket = Bucket("mixed" if T > 64 else "decode", T, T)
    return Case(name, inputs, {"float32": 0.0}, "integers are exact", bucket, size)


CASES = (
    _case(0, 4, 2, 0),
    _case(1, 4, 2, 1, (0, 3)),
    _case(7, 6, 2, 0),
    _case(66, 6, 4, 3, (1, 1, 1, 1, 1, 1)),
    *(_case(T, 256, 8, 2, tuple(range(32)), "real") for T in (1, 64, 1024)),
)
