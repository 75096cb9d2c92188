"""Families with recurrent layers that go on from snapshots of 8 bits, beside transformers in float32: log-probabilities
are near, texts that were never resumed are exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graphllm.config import Bucket
from graphllm.loading.checkpoint.source import open_source
from tests.artifacts import artifact_of
from tests.engine.harness import GREEDY, Result, finish, open_core, request
from tests.models import test_parity as parity
from tests.tiers import COMPILED, ON_GPU, thorough

COUNT, SEQS, LENGTHS = 12, 3, (33, 66, 100)
BUCKETS = (Bucket("decode", 1, 1), Bucket("decode", 2, SEQS), Bucket("decode", 2, SEQS, 3), Bucket("mixed", 2, 32))
# Of the 8 likeliest tokens. Weights are drawn so widely that rounding shows.
TOLERANCE = {"mamba2": 0.05, "jamba": 0.05, "qwen3_next": 0.1, "zamba2": 0.05}
SCORED = replace(GREEDY, logprobs=8)


@pytest.mark.parametrize("name", ["mamba2", *map(thorough, ("jamba", "qwen3_next", "zamba2"))])
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=COMPILED)])
def test_texts_that_go_on_from_rounded_states(name: str, backend: str, tmp_path: Path) -> None:
    arch = next(a for a in parity.ARCHS if a.name == name)
    model = parity.saved_oracle(arch, tmp_path)
    target = "cuda" if ON_GPU and backend == "inductor" else "cpu"
    place = artifact_of(
        open_source(tmp_path), target=target, backend=backend, dtype="float32", max_model_len=128, max_num_seqs=SEQS,
        max_num_batched_tokens=32, block_size=16, num_speculative_tokens=2, tune=False, buckets=BUCKETS,
        snapshot_dtype="int8",
    )  # fmt: skip
    core = open_core(tmp_path, place, 80, snapshots=20)
    draw = torch.Generator().manual_seed(3)
    prompts = {str(n): torch.randint(parity.V, (n,), generator=draw).tolist() for n in LENGTHS}

    def run() -> tuple[dict[str, Result], float]:
        """All prompts at once; the largest difference of a log-probability to transformers'."""
        found, worst = finish(core, [request(id, p, SCORED, limit=COUNT) for id, p in prompts.items()]), 0.0
        for id, prompt in prompts.items():
            with torch.no_grad():
                expected = parity._forced(model, prompt, found[id].tokens).log_softmax(-1)
            for row, scored in zip(expected, found[id].logprobs, strict=True):
                likeliest = zip(scored.top_ids, scored.top_logprobs, strict=True)
                worst = max(worst, *(abs(value - float(row[token])) for token, value in likeliest))
        return found, worst

    first, exact = run()
    assert [r.cached for r in first.values()] == [0, 0, 0]
    assert exact < 1e-4
    again, rounded = run()
    assert [r.cached for r in again.values()] == [32, 64, 96]
    assert exact < rounded < TOLERANCE[name]
    core.close()
