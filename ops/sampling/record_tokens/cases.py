"""Inputs for record_tokens: rows counted or not, kept or not, without a token, padding that shares the scrap slot."""

from __future__ import annotations

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker

_PROMPT = 1 << 30


def _case(S: int, V: int, padding: int = 0, drafts: int = 0, size: str = "small") -> Case:
    """One case. padding: rows after the S of the scrap slot, all with one token, since any of them may stay there.
    drafts: number of rows before each one that are kept in its slot, too, but for every third."""
    N = S + 2

    def inputs(make: Maker) -> dict[str, object]:
        tokens = make.integers(-V // 4, V, S).clamp(min=-1).tolist()
        counted = make.integers(0, 2, S).tolist()
        slots = [*range(S)][::-1]
        newest, kept = list(slots), list(slots)
        for i in range(S * drafts):  # the scrap slot's last token may be any of theirs, so they have the one of padding
            newest.append(N - 1)
            kept.append(N - 1 if i % 3 == 2 else slots[i // drafts])
            tokens.append(3)
            counted.append(counted[i // drafts])
        return {
            "tokens_S": make.tensor(tokens + [3] * padding, torch.int32),
            "slot_S": make.tensor(newest + [N - 1] * padding, torch.int32),
            "kept_slot_S": make.tensor(kept + [N - 1] * padding, torch.int32),
            "counted_S": make.tensor(counted + [1] * padding, torch.int32),
            "last_token_N": make.integers(0, V, N),
            "counts_NV": make.integers(0, 3, N, V) + (make.integers(0, 2, N, V) * _PROMPT),
        }

    return Case(
        f"s{S}_v{V}_pad{padding}" + (f"_drafts{drafts}" if drafts else ""),
        inputs,
        {"float32": 0.0},
        "integers are exact",
        Bucket("decode", S + padding, S + padding, 1 + drafts),
        size,  # type: ignore[arg-type]
    )


CASES = (
    _case(0, 7),
    _case(1, 5),
    _case(9, 40, padding=3),
    _case(7, 40, padding=2, drafts=4),
    _case(300, 33, padding=20),
    _case(0, 9, padding=2),
    *(_case(S, 151936, size="real") for S in (1, 64, 256)),
)
