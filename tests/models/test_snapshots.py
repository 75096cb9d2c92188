"""Families with recurrent layers that go on from snapshots, beside transformers in float32: exact from states inside of
chunks, near from those in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from graphllm.cli.inspect import inspect
from graphllm.config import Bucket
from graphllm.loading.checkpoint.source import open_source
from tests.artifacts import artifact_of
from tests.engine.harness import GREEDY, finish, open_core, request
from tests.models import test_parity as parity
from tests.tiers import COMPILED, ON_GPU, thorough

COUNT, SEQS = 12, 3
BUCKETS = (Bucket("decode", 1, 1), Bucket("decode", 2, SEQS), Bucket("decode", 2, SEQS, 3), Bucket("mixed", 2, 32))
# Of the 8 likeliest tokens. Weights are drawn so widely that rounding shows.
TOLERANCE = {"mamba2": 0.05, "jamba": 0.05, "qwen3_next": 0.1, "zamba2": 0.05}
SCORED = replace(GREEDY, logprobs=8)


class Opened:
    """A core of a family, transformers' model, and prompts."""

    def __init__(
        self, name: str, backend: str, folder: Path, step_tokens: int, lengths: Sequence[int], **more: Any
    ) -> None:
        self._model = parity.saved_oracle(next(a for a in parity.ARCHS if a.name == name), folder)
        target = "cuda" if ON_GPU and backend == "inductor" else "cpu"
        place = artifact_of(
            open_source(folder), target=target, backend=backend, dtype="float32", max_model_len=192, max_num_seqs=SEQS,
            max_num_batched_tokens=step_tokens, block_size=16, tune=False, **more,
        )  # fmt: skip
        self.place, self.core = place, open_core(folder, place, 80, snapshots=20)
        draw = torch.Generator().manual_seed(3)
        self._prompts = {str(n): torch.randint(parity.V, (n,), generator=draw).tolist() for n in lengths}

    def run(self) -> tuple[list[int], float]:
        """All prompts at once: what each found in the cache, and the largest difference of a log-probability to
        transformers'."""
        requests = [request(id, p, SCORED, limit=COUNT) for id, p in self._prompts.items()]
        found, worst = finish(self.core, requests), 0.0
        for id, prompt in self._prompts.items():
            with torch.no_grad():
                expected = parity._forced(self._model, prompt, found[id].tokens).log_softmax(-1)
            for row, scored in zip(expected, found[id].logprobs, strict=True):
                likeliest = zip(scored.top_ids, scored.top_logprobs, strict=True)
                worst = max(worst, *(abs(value - float(row[token])) for token, value in likeliest))
        return [result.cached for result in found.values()], worst


@pytest.mark.parametrize("name", ["mamba2", *map(thorough, ("jamba", "qwen3_next", "zamba2"))])
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=COMPILED)])
def test_texts_that_go_on_from_rounded_states(
    name: str, backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = (33, 66, 100)
    opened = Opened(
        name, backend, tmp_path, 32, lengths, num_speculative_tokens=2, buckets=BUCKETS, snapshot_dtype="int8"
    )
    cached, exact = opened.run()
    assert cached == [0, 0, 0]
    assert exact < 1e-4
    cached, rounded = opened.run()
    assert cached == [32, 64, 96]
    assert exact < rounded < TOLERANCE[name]
    opened.core.close()
    inspect(opened.place, json=False)
    assert "each in int8; by default 12 of them" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", ["mamba2", *map(thorough, ("jamba", "lfm2", "qwen3_next", "zamba2"))])
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=COMPILED)])
def test_texts_that_go_on_from_inside_of_a_chunk(name: str, backend: str, tmp_path: Path) -> None:
    """Prompts take one step, and later ones find their states at the last multiple of 64 tokens."""
    opened = Opened(name, backend, tmp_path, 320, (70, 100, 129))
    before = opened.core.stats().steps
    cached, exact = opened.run()
    assert opened.core.stats().steps - before == COUNT
    assert cached == [0, 0, 0]
    assert exact < 1e-4
    cached, exact = opened.run()
    assert cached == [64, 64, 128]
    assert exact < 1e-4
    opened.core.close()
