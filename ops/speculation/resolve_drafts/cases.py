"""Inputs for resolve_drafts: sequences with and without drafts, in flight and not, and padding."""

from __future__ import annotations

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker


def _case(counts: tuple[int, ...], K: int = 3, padding: int = 0) -> Case:
    """One case. counts: tokens of each sequence. padding: tokens after them."""
    S, T = len(counts), sum(counts)
    N = S + 2

    def inputs(make: Maker) -> dict[str, object]:
        starts = [sum(counts[:i]) for i in range(S + 1)]
        owner = [s for s, n in enumerate(counts) for _ in range(n)]
        positions = torch.tensor([50 + i for n in counts for i in range(n)] + [0] * padding)
        return {
            "token_ids_T": make.integers(-9, 9, T + padding),
            "positions_T": make.tensor(positions.tolist(), torch.int32),
            "context_lens_T": make.tensor([60] * T + [0] * padding, torch.int32),
            "seq_lens_S": make.tensor([50 + n for n in counts], torch.int32),
            "sequence_ids_T": make.tensor(owner + [0] * padding, torch.int32),
            "query_start_loc": make.tensor(starts, torch.int32),
            "slots_S": make.tensor([*range(S)][::-1], torch.int32),
            "pending_S": make.integers(0, 2, S),
            "last_token_N": make.integers(0, 99, N),
            "drafts_NK": make.integers(-1, 99, N, K),
            "rejected_N": make.integers(0, K, N),
        }

    name = "_".join(map(str, counts)) or "nothing"
    return Case(
        f"{name}_k{K}_pad{padding}", inputs, {"float32": 0.0}, "integers are exact", Bucket("mixed", T, T + padding)
    )


CASES = (
    _case((0,)),
    _case((1,)),
    _case((4, 4, 4)),
    _case((1, 3, 17, 1), padding=5),
    _case((2, 2), K=1),
)
