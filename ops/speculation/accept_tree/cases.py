"""Inputs for accept_tree: trees with right drafts along every path, chains, prompts in the same step, and padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graphllm.config import Bucket
from graphllm.ir.testing import Case, Maker

_TREE = (-1, 0, 0, 1, 1, 2)
_CHAIN = (-1, 0, 1, 2)


def _case(
    name: str, parents: tuple[int, ...], right: tuple[tuple[int, ...], ...], prompts: tuple[int, ...] = (),
    padding: int = 0, scored: int = 0, absent: tuple[int, ...] = (),
) -> Case:  # fmt: skip
    """One case. right: of each sequence with a tree, the nodes with right drafts. prompts: tokens of further
    sequences, the last one is sampled from, and ``scored`` before it have rows without a slot. absent: nodes
    without a draft."""
    nodes = len(parents)
    counts = [nodes] * len(right) + list(prompts)
    rows = [nodes] * len(right) + [min(n, 1 + scored) for n in prompts]
    S, T = len(counts), sum(counts)
    levels = 0
    for parent in parents[1:]:
        depth = 1
        while parent:
            depth, parent = depth + 1, parents[parent]
        levels = max(levels, depth)

    def inputs(make: Maker) -> dict[str, object]:
        tokens: list[int] = []
        drafts: list[int] = []
        indices: list[int] = []
        owner: list[int] = []
        for s, (n, r) in enumerate(zip(counts, rows, strict=True)):
            sampled = torch.randint(1, 50, (r,), generator=make.generator, device=make.generator.device).tolist()
            follow = [0] * n
            if s < len(right):
                for node in range(1, nodes):
                    follow[node] = sampled[parents[node]] if node in right[s] else 60 + node
                    follow[node] = -1 if node in absent else follow[node]
            indices += [len(drafts) + n - r + i for i in range(r)]
            tokens, drafts, owner = tokens + sampled, drafts + follow, owner + [s] * n
        starts = [sum(counts[:i]) for i in range(S + 1)]
        row_starts = [sum(rows[:i]) for i in range(S + 1)]
        of_row = [s if s < len(right) or i == r - 1 else S for s, r in enumerate(rows) for i in range(r)]

        def ints(values: list[int], pad: int = 0) -> torch.Tensor:
            return make.tensor(values + [pad] * padding, torch.int32)

        return {
            "tokens_R": ints(tokens, 3), "row_slots_R": ints(of_row, S), "drafts_T": ints(drafts),
            "logits_indices_R": ints(indices), "sequence_ids_T": ints(owner),
            "query_start_loc": make.tensor(starts, torch.int32),
            "row_start_loc": make.tensor(row_starts, torch.int32), "slots_S": make.tensor([*range(S)], torch.int32),
            "rejected_N": make.integers(0, 9, S + 1), "path_NL": make.integers(0, 9, S + 1, levels + 2),
            "parents": list(parents),
        }  # fmt: skip

    def specified(output: torch.Tensor, args: Mapping[str, Any]) -> torch.Tensor:
        return output[: int(args["row_start_loc"][-1])]

    bucket = Bucket("mixed", T, T + padding)
    return Case(name, inputs, {"float32": 0.0}, "integers are exact", bucket, specified=specified)


CASES = (
    _case("chain", _CHAIN, ((), (1,), (1, 2), (1, 2, 3), (2, 3))),
    _case("paths", _TREE, ((), (1, 3), (1, 4), (2, 5), (3, 4, 5), (1, 5), (1, 2, 3, 4, 5)), padding=2),
    _case("beside_prompts", _TREE, ((2, 5), (1,)), (9, 1, 3), padding=4, scored=2),
    _case("prompts_alone", _CHAIN, (), (1, 7)),
    _case("drafts_that_there_are_not", _TREE, ((1, 3), (2,)), absent=(2, 5)),
    _case("nothing", _CHAIN, (), (0,)),
)
