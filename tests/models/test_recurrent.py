"""Families with recurrent layers in an engine core, beside transformers: batches in chunks, prefixes that are found
again, drafts that are rejected."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from graphllm.config import Bucket
from graphllm.engine.core import EngineCore
from graphllm.loading.checkpoint.source import open_source
from tests.artifacts import artifact_of
from tests.engine.harness import GREEDY, finish, open_core, request
from tests.models import test_parity as parity
from tests.tiers import COMPILED, ON_GPU, thorough

COUNT, SEQS, LENGTHS = 12, 3, (1, 7, 33, 66, 100)
NAMES = (
    "mamba2",
    "jamba",
    *map(
        thorough,
        (
            "mamba",
            "falcon_mamba",
            "granite_hybrid",
            "nemotron_h",
            "lfm2",
            "falcon_h1",
            "zamba2",
            "qwen3_next",
            "qwen3_5",
            "olmo_hybrid",
            "kimi_linear",
        ),
    ),
)
BUCKETS = (Bucket("decode", 1, 1), Bucket("decode", 2, SEQS), Bucket("decode", 2, SEQS, 3), Bucket("mixed", 2, 32))


class Opened:
    """A family's core with room for fewer sequences and tokens than are asked for, and transformers' model."""

    def __init__(self, name: str, backend: str, folder: Path) -> None:
        arch = next(a for a in parity.ARCHS if a.name == name)
        self.model = parity.saved_oracle(arch, folder)
        target = "cuda" if ON_GPU and backend == "inductor" else "cpu"
        place = artifact_of(
            open_source(folder), target=target, backend=backend, dtype="float32", max_model_len=128, max_num_seqs=SEQS,
            max_num_batched_tokens=32, block_size=16, num_speculative_tokens=2, tune=False, buckets=BUCKETS,
        )  # fmt: skip
        self._place = folder, place
        self.open(pages=80, snapshots=20)
        draw = torch.Generator().manual_seed(3)
        self.prompts = {str(n): torch.randint(parity.V, (n,), generator=draw).tolist() for n in LENGTHS}

    def open(self, pages: int, snapshots: int) -> None:
        """A core with so many blocks, the null block among them."""
        self.core: EngineCore = open_core(*self._place, pages, snapshots=snapshots)

    def run(
        self, prompts: Mapping[str, list[int]], drafts: Mapping[str, list[int]] = {}, right: float = 1.0,
        kills: Mapping[str, int] = {},
    ) -> dict[str, int]:  # fmt: skip
        """Checks the tokens of prompts; how many tokens each found in the cache. drafts: by request, what to propose,
        each right with that likelihood. kills: by request, the step before which it is aborted."""
        rng, table = random.Random(0), self.core.scheduler.requests

        def propose(number: int) -> None:
            self.core.abort([id for id, step in kills.items() if step == number])
            for state in table.by_slot if drafts else ():
                if state is not None:
                    tokens = drafts[state.request.id][len(state.output) :]
                    table.propose(state, [t if rng.random() < right else (t + 1) % parity.V for t in tokens])

        found = finish(self.core, [request(id, p, GREEDY, limit=COUNT) for id, p in prompts.items()], propose)
        self.tokens = {id: result.tokens for id, result in found.items()}
        with torch.no_grad():
            for id, prompt in prompts.items():
                if found[id].finish_reason == "abort":
                    continue
                expected = parity._forced(self.model, prompt, self.tokens[id])
                assert self.tokens[id] == expected.argmax(-1).tolist(), id
        return {id: result.cached for id, result in found.items()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=COMPILED)])
def test_every_way(name: str, backend: str, tmp_path: Path) -> None:
    opened = Opened(name, backend, tmp_path)
    core, prompts = opened.core, opened.prompts
    opened.run({"100": prompts["100"]})  # alone
    opened.run(prompts)  # batched, in chunks
    assert opened.run(prompts) == {"1": 0, "7": 0, "33": 32, "66": 64, "100": 96}
    assert opened.run({"0": [*prompts["66"], 3, 4]}) == {"0": 64}  # it goes on from a prefix

    opened.run(prompts)
    drafts = opened.tokens
    steps = [core.stats().steps]
    for right in (1.0, 0.0, 0.5):
        opened.run(prompts, drafts, right)
        assert opened.tokens == drafts
        steps.append(core.stats().steps)
    kept, rejected, _ = (after - before for before, after in itertools.pairwise(steps))
    assert rejected > 1.5 * kept
    core.close()

    for pages, snapshots in ((80, 20), (12, 4)):
        opened.open(pages, snapshots)
        _conversations(opened, whole=pages == 80)
        tight = pages == 12 and bool(opened.core.scheduler.cache.groups)
        assert (opened.core.stats().preemptions > 0) == tight
        opened.core.close()


def _conversations(opened: Opened, whole: bool) -> None:
    """Four that begin alike, turn by turn; two requests of each turn are killed, and come again. whole: everything
    fits, so each turn finds the one before and its answer, up to a block's end."""
    rng, texts = random.Random(1), {f"{c}": [*opened.prompts["33"], 1 + c, 2, 3] for c in range(4)}
    known = dict.fromkeys(texts, 0)
    for turn in range(3):
        found = opened.run(texts, kills={"1": 2 + turn, "3": 8 + turn})
        assert not (whole and turn) or [found["0"], found["2"]] == [known["0"], known["2"]]
        opened.run(texts)
        for id, text in texts.items():
            computed = len(text) + COUNT - 1
            text += [*opened.tokens[id], *rng.choices(range(parity.V), k=5 + turn)]
            known[id] = min(computed, len(text) - 1) // 16 * 16
