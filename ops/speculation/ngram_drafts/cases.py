"""Inputs for ngram_drafts: texts that repeat themselves and others, several kept rows, rows without a slot, histories
that are full and go round."""

from __future__ import annotations

from typing import Any

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker


def _case(
    kept: tuple[int, ...], L: int, K: int, end: int, alphabet: int = 3, smallest: int = 1, largest: int = 4
) -> Case:
    """kept: rows of each sequence that are kept, of K + 1, or the only one of a step that verifies nothing."""
    S = len(kept)
    R, N = sum((K + 1) if n > 1 else 1 for n in kept), S + 3

    def inputs(make: Maker) -> dict[str, Any]:
        order = torch.randperm(N - 1, generator=make.generator, device=make.generator.device)[:S].tolist()
        slots, newest, positions = [], [], []
        for i, n in enumerate(kept):
            rows = (K + 1) if n > 1 else 1
            slots += [order[i] if n else N - 1] * rows
            newest += [order[i] if n and row == n - 1 else N - 1 for row in range(rows)]
            positions += [end + 7 * i + row for row in range(rows)]
        return {
            "tokens_R": make.integers(-1, alphabet, R), "positions_R": make.tensor(positions, torch.int32),
            "slots_R": make.tensor(slots, torch.int32), "newest_R": make.tensor(newest, torch.int32),
            "history_NL": make.integers(0, alphabet, N, L), "drafts_NK": make.integers(-1, alphabet, N, K),
            "smallest": smallest, "largest": largest,
        }  # fmt: skip

    name = f"S{S}_L{L}_K{K}_end{end}_of{alphabet}_n{smallest}to{largest}_kept{max(kept, default=0)}"
    tolerance = dict.fromkeys(("float32", "bfloat16", "float16"), 0.0)
    return Case(name, inputs, tolerance, "numbers are copied", Bucket("decode", S, S))


CASES = (
    _case((1,), 40, 3, 0),
    _case((1, 1, 1), 40, 3, 20),
    _case((2, 4, 1, 3), 64, 3, 40, 4, 2, 3),
    _case((1, 0, 5, 1), 50, 4, 130, 2),  # round and round
    _case((1, 3, 1), 2100, 2, 1500, 6, 3, 5),
    _case((3, 1), 48, 2, 30, 1000, 2, 4),  # nothing repeats
    _case((), 40, 3, 0),
)
