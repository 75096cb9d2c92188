"""Models of transformers' own code in an engine core, beside transformers: batches in chunks, prefixes that are found
again, drafts; and as tensor-parallel ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from graphllm.config import Bucket
from graphllm.loading.checkpoint.source import open_source
from tests.artifacts import artifact_of
from tests.engine.harness import GREEDY, finish, open_core, request
from tests.models import driver
from tests.models.causal_types import V, difference, random_model, tiny
from tests.models.sharded import Sharded
from tests.tiers import COMPILED, ON_GPU, thorough

COUNT, SEQS, LENGTHS = 8, 3, (1, 7, 33, 66, 100)
BUCKETS = (Bucket("decode", 1, 1), Bucket("decode", 2, SEQS), Bucket("decode", 2, SEQS, 3), Bucket("mixed", 2, 32))


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=COMPILED)])
@pytest.mark.parametrize("kind", ["olmo3", *map(thorough, ("cohere2", "stablelm", "diffllama", "gemma4_text"))])
def test_batches_chunks_prefixes_and_drafts(kind: str, backend: str, tmp_path: Path) -> None:
    config = tiny(kind)
    model = random_model(config)
    model.save_pretrained(tmp_path)
    target: Any = "cuda" if ON_GPU and backend == "inductor" else "cpu"
    place = artifact_of(
        open_source(tmp_path), target=target, backend=backend, dtype="float32", max_model_len=128, max_num_seqs=SEQS,
        max_num_batched_tokens=32, block_size=16, num_speculative_tokens=2, tune=False, buckets=BUCKETS,
    )  # fmt: skip
    core = open_core(tmp_path, place, 160)
    draw = torch.Generator().manual_seed(3)
    prompts = {str(n): torch.randint(V, (n,), generator=draw).tolist() for n in LENGTHS}

    def run(asked: dict[str, list[int]], drafts: dict[str, list[int]]) -> dict[str, Any]:
        table = core.scheduler.requests

        def propose(_: int) -> None:
            for state in table.by_slot if drafts else ():
                if state is not None:
                    table.propose(state, drafts[state.request.id][len(state.output) :])

        return finish(core, [request(id, p, GREEDY, limit=COUNT) for id, p in asked.items()], propose)

    first = run(prompts, {})
    for id, prompt in prompts.items():
        drawn = first[id].tokens
        expected = model(torch.tensor([prompt + drawn[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
        assert drawn == expected.argmax(-1).tolist(), id
    tokens, steps = {id: result.tokens for id, result in first.items()}, core.stats().steps
    again = run(prompts, {})
    assert {id: result.tokens for id, result in again.items()} == tokens
    assert again["100"].cached >= 64
    between = core.stats().steps
    drafted = run(prompts, tokens)
    assert {id: result.tokens for id, result in drafted.items()} == tokens
    assert core.stats().steps - between < between - steps, "no draft was kept"


@pytest.mark.parametrize("kind", ["cohere2", *map(thorough, ("olmo3", "glm4", "gpt_neox", "phi", "starcoder2"))])
def test_tensor_parallel_ranks(kind: str, tmp_path: Path) -> None:
    config = tiny(kind)
    model = random_model(config)
    model.save_pretrained(tmp_path)
    opened: list[Sharded] = []

    def ranks_of(place: Path, checkpoint: Any) -> Sharded:
        opened.append(Sharded(place, checkpoint, 2, num_blocks=64))
        return opened[0]

    runner = driver.Driver(tmp_path, "eager", settings={"tensor_parallel_size": 2}, opened=ranks_of)
    with opened[0]:
        assert difference(model, runner, config.vocab_size) < 2e-4
    stored = sum(p.numel() * 4 for p in model.parameters())
    own = sum(t.nbytes for t in {t.data_ptr(): t for t in opened[0].weights[0].values()}.values())
    assert own < 0.6 * stored
