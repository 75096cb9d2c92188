"""Trees of drafts that grow: whatever scores are, and however those of the run before were rounded, every draft stands
behind the one that it was guessed behind."""

from __future__ import annotations

import pytest
import torch

from graphllm.compile.tasks.dynamic_trees import DynamicLevels
from graphllm.compile.tasks.verified_trees import NODE_STATES as STATES
from graphllm.compile.tasks.verified_trees import verification_of
from graphllm.config import CompileConfig, Target
from graphllm.config.token_tree import DynamicTree
from graphllm.ir.model import Graph

FIRST = 100  # token of candidate 0; candidate n is FIRST + n


@pytest.mark.parametrize("seed", range(40))
def test_drafts_stand_behind_their_own(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    tree = DynamicTree(top_k=2, levels=4, drafts=7)
    k, C, F = tree.top_k, tree.candidates, tree.rows
    depths = [range(k), *(range(k + d * k * k, k + (d + 1) * k * k) for d in range(tree.levels - 2))]
    rows = [n for depth in depths for n in sorted(depth[int(i)] for i in torch.randperm(len(depth), generator=g)[:k])]
    likely = torch.tensor([0.0, -1e-7, -8.0])  # mostly sure: paths have equal scores, up to rounding
    logprobs = likely[torch.randint(3, (F, k), generator=g)]
    tokens = torch.arange(FIRST + k, FIRST + C).view(F, k)
    scores = torch.cat([torch.tensor([0.0, -8.0]), torch.randn(C - k, generator=g) * 1e-6])
    v = {
        "step.slots": torch.tensor([1], dtype=torch.int32),
        "step.query_start_loc": torch.tensor([0, F], dtype=torch.int32),
        "drafted": torch.cat([logprobs, tokens.float()], -1),
        "x": torch.zeros(F, 3),
        "state.grown_tokens": torch.arange(FIRST, FIRST + C, dtype=torch.int32).repeat(3, 1),
        "state.grown_scores": scores.repeat(3, 1),
        "state.grown_rows": torch.tensor(rows, dtype=torch.int32).repeat(3, 1),
        "state.draft_position": torch.full((3,), 9, dtype=torch.int32),
        "state.draft_token": torch.zeros(3, dtype=torch.int32),
        "state.draft_count": torch.zeros(3, dtype=torch.int32),
        "state.drafts": torch.zeros(3, tree.drafts, dtype=torch.int32),
        "state.tree_hidden": torch.zeros(3, F * 3),
        **{f"state.{n}": torch.zeros(3, tree.nodes, dtype=torch.int64 if "bits" in n else torch.int32) for n in STATES},
    }
    config = CompileConfig(
        Target("cpu", ()), max_model_len=91, num_speculative_tokens=7,
        speculative_token_tree="{'top_k': 2, 'depth': 4, 'drafts': 7}",
    )  # fmt: skip
    graph = Graph(*(lambda *_: () for _ in range(7)))  # type: ignore[misc, arg-type]
    DynamicLevels(graph, None, config, None, verification_of(config)).choose_next(v)
    parents, bits, levels = (v[f"state.{n}"][1].tolist() for n in STATES)
    numbers = [-1, *(token - FIRST for token in v["state.drafts"][1].tolist())]
    assert len(set(numbers)) == tree.nodes
    for node in range(1, tree.nodes):
        number, parent = numbers[node], parents[node]
        assert numbers[parent] == (-1 if number < k else rows[(number - k) // k])
        assert levels[node] == levels[parent] + 1
        assert bits[node] == bits[parent] | 1 << node
