"""Inputs for record_tokens: rows counted or not, rows without a token, padding rows that share the scrap slot."""

from __future__ import annotations

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker

_PROMPT = 1 << 30


def _case(S: int, V: int, padding: int = 0, size: str = "small") -> Case:
    """One case. padding: rows after the S of the scrap slot, all with one token, since any of them may stay there."""
    N = S + 2

    def inputs(make: Maker) -> dict[str, object]:
        tokens = make.integers(-V // 4, V, S).clamp(min=-1).tolist()
        counted = make.integers(0, 2, S).tolist()
        return {
            "tokens_S": make.tensor(tokens + [3] * padding, torch.int32),
            "slot_S": make.tensor([*range(S)][::-1] + [N - 1] * padding, torch.int32),
            "counted_S": make.tensor(counted + [0] * padding, torch.int32),
            "last_token_N": make.integers(0, V, N),
            "counts_NV": make.integers(0, 3, N, V) + (make.integers(0, 2, N, V) * _PROMPT),
        }

    return Case(
        f"s{S}_v{V}_pad{padding}",
        inputs,
        {"float32": 0.0},
        "integers are exact",
        Bucket("decode", S + padding, S + padding),
        size,  # type: ignore[arg-type]
    )


CASES = (
    _case(0, 7),
    _case(1, 5),
    _case(9, 40, padding=3),
    _case(300, 33, padding=20),
    _case(0, 9, padding=2),
    *(_case(S, 151936, size="real") for S in (1, 64, 256)),
)
