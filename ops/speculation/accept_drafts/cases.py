"""Inputs for accept_drafts: drafts that are right up to every place, prompts without rows, short drafts, padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker


def _case(
    right: tuple[int, ...], versions: int, prompts: tuple[int, ...] = (), padding: int = 0, scored: int = 0
) -> Case:
    """One case. right: of each sequence with ``versions`` rows, how many drafts are. prompts: tokens of further
    sequences, the last one is sampled from, and ``scored`` before it have rows without a slot."""
    counts = [versions] * len(right) + list(prompts)
    rows = [versions] * len(right) + [min(n, 1 + scored) for n in prompts]
    S, T = len(counts), sum(counts)
    N = S + 1

    def inputs(make: Maker) -> dict[str, object]:
        tokens: list[int] = []
        drafts: list[int] = []
        indices: list[int] = []
        owner: list[int] = []
        for s, (n, r) in enumerate(zip(counts, rows, strict=True)):
            sampled = torch.randint(1, 50, (r,), generator=make.generator, device=make.generator.device).tolist()
            follow = [0] * (n - r + 1) + sampled[:-1]
            if s < len(right) and right[s] < versions - 1:
                follow[1 + right[s]] = -1
            indices += [len(drafts) + n - r + i for i in range(r)]
            tokens, drafts, owner = tokens + sampled, drafts + follow, owner + [s] * n
        starts = [sum(counts[:i]) for i in range(S + 1)]
        row_starts = [sum(rows[:i]) for i in range(S + 1)]
        drafted = range(len(right))
        of_row = [s if s in drafted or i == r - 1 else S for s, r in enumerate(rows) for i in range(r)]

        def ints(values: list[int], pad: int = 0) -> torch.Tensor:
            return make.tensor(values + [pad] * padding, torch.int32)

        return {
            "tokens_R": ints(tokens, 3), "logits_indices_R": ints(indices), "row_slots_R": ints(of_row, S),
            "drafts_T": ints(drafts), "sequence_ids_T": ints(owner),
            "query_start_loc": make.tensor(starts, torch.int32),
            "row_start_loc": make.tensor(row_starts, torch.int32), "slots_S": make.tensor([*range(S)], torch.int32),
            "rejected_N": make.integers(0, 9, N), "version_N": make.integers(0, 9, N), "versions": versions,
        }  # fmt: skip

    def specified(output: torch.Tensor, args: Mapping[str, Any]) -> torch.Tensor:
        return output[: int(args["row_start_loc"][-1])]

    shown = "_".join(map(str, right)) or "none"
    name = f"right{shown}_of{versions}_prompts{len(prompts)}_scored{scored}_pad{padding}"
    bucket = Bucket("mixed", T, T + padding)
    return Case(name, inputs, {"float32": 0.0}, "integers are exact", bucket, specified=specified)


CASES = (
    _case((), 4, (0,)),
    _case((), 4, (1,)),
    _case((0, 1, 2, 3), 4),
    _case((1, 0), 2, padding=3),
    _case((2,), 3, (5, 1, 9), padding=2),
    _case((1,), 3, (9, 7), padding=1, scored=4),
    _case((), 1, (1, 4)),
)
