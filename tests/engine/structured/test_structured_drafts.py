"""Structured outputs with drafts: each draft position has its own mask, and texts are as without drafts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from graphllm.config import SpeculationConfig
from graphllm.config.requests.sampling_params import SamplingParams, StructuredOutputsParams
from graphllm.embedded import MODEL_DIR
from graphllm.engine.core import EngineCore
from graphllm.engine.parts.drafts import Drafts
from graphllm.engine.requests.request import EngineRequest, ThinkingBudget
from graphllm.engine.requests.text import Tokenizer
from tests.artifacts import artifact_of
from tests.engine.harness import finish, open_core, request
from tests.tiers import thorough

ROWS = '[{"name": "plum", "count": 3}, {"name": "pear", "count": 3}, {"name": "fig", "count": 3}, '
LIST: dict[str, Any] = {
    "type": "array", "minItems": 3, "maxItems": 4,
    "items": {
        "type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "count": {"type": "integer"}},
        "required": ["name", "count"], "additionalProperties": False,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def cores() -> Iterator[dict[str, EngineCore]]:
    """Without drafts, with those of the host, with those of the device."""
    sizes = {"max_model_len": 512, "max_num_seqs": 8, "block_size": 8, "num_speculative_tokens": 4}
    place = functools.partial(artifact_of, MODEL_DIR, backend="eager", dtype="float32", **sizes)
    places = {"host": place(), "device": place(prompt_lookup_max=3)}
    stops = tuple(sorted(Tokenizer.from_folder(MODEL_DIR).stop_ids))
    suffix = SpeculationConfig(draft_proposer="suffix")
    made = {
        "plain": open_core(MODEL_DIR, places["host"], pages=400, stop_ids=stops),
        "host": open_core(MODEL_DIR, places["host"], pages=400, stop_ids=stops, speculation=suffix),
        "device": open_core(MODEL_DIR, places["device"], pages=400, stop_ids=stops),
    }
    yield made
    for core in made.values():
        core.close()


def _requests() -> list[EngineRequest]:
    tokenizer = Tokenizer.from_folder(MODEL_DIR)
    stops = sorted(tokenizer.stop_ids)
    asked: list[dict[str, Any]] = [
        {"structured_outputs": StructuredOutputsParams(json=LIST)},
        {"structured_outputs": StructuredOutputsParams(json=LIST), "temperature": 0.5, "seed": 4, "logprobs": 1},
        {"structured_outputs": StructuredOutputsParams(json=LIST), "repetition_penalty": 1.05},
        {"structured_outputs": StructuredOutputsParams(regex="(plum, pear, ){3,9}fig")},
        {"structured_outputs": StructuredOutputsParams(regex="(plum, pear, ){3,9}fig"), "ignore_eos": True},
        {"structured_outputs": StructuredOutputsParams(choice=("plum, pear, fig", "plum, pear, fog, plum, pear"))},
        {"structured_outputs": StructuredOutputsParams(regex="(a b ){4}"), "min_tokens": 9, "max_tokens": 30},
    ]
    found = []
    for i, more in enumerate(asked):
        text = f"Repeat this: {ROWS * 2} plum, pear, plum, pear, fig"
        prompt = tokenizer.encode_chat([{"role": "user", "content": text}])
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 70, **more})
        ends = [] if params.ignore_eos else stops
        found.append(request(str(i), prompt, params, stop_ids=ends))
    start, end = (tokenizer.encode(t)[0] for t in "([")
    thinking = ThinkingBudget(tokens=9, start=start, end=end, begun=True)
    params = SamplingParams(
        temperature=0.0, max_tokens=80, structured_outputs=StructuredOutputsParams(regex="(plum, pear, ){2,9}fig")
    )
    return [*found, request("thinking", found[0].prompt, params, stop_ids=stops, thinking=thinking)]


@pytest.mark.thorough
@pytest.mark.parametrize("where", [thorough("host"), "device"])
def test_grammars_with_drafts(cores: dict[str, EngineCore], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one batch, then some in smaller ones."""
    core, wanted = cores[where], _requests()
    monkeypatch.setattr(
        core.part(Drafts).planner.acceptance, "best", lambda sequences, lengths, share=1.0, **runs: lengths[-1]
    )
    alone = finish(cores["plain"], wanted)
    tokenizer = Tokenizer.from_folder(MODEL_DIR)
    won = []
    for some in (wanted, wanted[3:4], wanted[6:]):
        before = sum(core.stats().accepted_tokens)
        for id, got in finish(core, some).items():
            plain = alone[id]
            assert got.error is None
            assert got.tokens == plain.tokens, (id, tokenizer.decode(got.tokens), tokenizer.decode(plain.tokens))
            assert (got.finish_reason, got.stop_reason) == (plain.finish_reason, plain.stop_reason)
            assert [x.token for x in got.logprobs] == [x.token for x in plain.logprobs]
        won.append(sum(core.stats().accepted_tokens) - before)
    assert won[0] > 60
    assert min(won) > 0, won
