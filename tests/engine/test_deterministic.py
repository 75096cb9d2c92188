"""Deterministic mode: tokens and log-probabilities of a request are bitwise what it gets alone, in random batches, with
prompts divided at random, beginnings from the prefix cache, and requests that are preempted and computed again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from graphllm.config import ConfigError, TierConfig
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.embedded import HYBRID_DIR, MODEL_DIR, MOE_DIR
from graphllm.engine.core import EngineCore
from graphllm.engine.requests.request import EngineRequest
from tests.artifacts import artifact_of
from tests.engine.harness import Result, finish, open_core, request

MODELS: dict[str, tuple[Path, dict[str, Any]]] = {
    "bfloat16": (MODEL_DIR, {"dtype": "bfloat16"}),
    "float32": (MODEL_DIR, {"dtype": "float32"}),
    "experts": (MOE_DIR, {"dtype": "bfloat16"}),
    "hybrid": (HYBRID_DIR, {"dtype": "bfloat16"}),
    "int8": (MODEL_DIR, {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "fp8"}),
}
BATCHES = 12  # of each model in the suite, and 500 with the slow tests
VOCABULARY = 4096


SETTINGS = {"max_model_len": 256, "max_num_seqs": 16, "block_size": 16, "deterministic": True}


IN_SUITE = ("bfloat16",)


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=() if n in IN_SUITE else pytest.mark.slow) for n in MODELS]
)
def place(request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """A model and its artifact."""
    model, settings = MODELS[request.param]
    return model, artifact_of(model, **SETTINGS, **settings)


def requests(draw: random.Random, count: int, longest: int = 0) -> list[EngineRequest]:
    """Prompts of all lengths, some with a beginning in common, greedy and sampled in several ways. longest: so many
    tokens more of some."""
    beginnings = [[draw.randrange(3, VOCABULARY) for _ in range(n)] for n in (0, 16, 37, 64, 97)]
    made = []
    for i in range(count):
        own = draw.choice((1, 2, 9, 40)) + (draw.randrange(longest) if longest and i % 6 == 0 else 0)
        prompt = [*draw.choice(beginnings), *(draw.randrange(3, VOCABULARY) for _ in range(own))]
        ways: tuple[dict[str, Any], ...] = (
            {"temperature": 0.0},
            {"temperature": 0.8, "top_p": 0.9},
            {"temperature": 1.0, "top_k": 50, "min_p": 0.02},
            {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.3},
        )
        params = SamplingParams(
            **draw.choice(ways), max_tokens=draw.choice((1, 3, 12, 40)), logprobs=3, ignore_eos=True, seed=i,
            prompt_logprobs=draw.choice((None, None, 2)),
        )  # fmt: skip
        made.append(request(str(i), prompt, params))
    return made


class Cores(NamedTuple):
    """Of one artifact. alone: without a prefix cache, for one request at a time. beside: with chunks of several
    lengths, and with many blocks and so few that requests are preempted."""

    alone: EngineCore
    beside: list[EngineCore]

    def close(self) -> None:
        for core in (self.alone, *self.beside):
            core.close()


@pytest.fixture(scope="module")
def cores(place: tuple[Path, Path]) -> Iterator[Cores]:
    made = Cores(
        open_core(*place, pages=200, enable_prefix_caching=False),
        [open_core(*place, pages=pages, long_prefill_token_threshold=chunk, tiers=TierConfig(host))
         for pages, chunk, host in ((400, 0, 0), (25, 0, 0), (25, 7, 0), (400, 3, 0), (25, 0, 64 << 20))],
    )  # fmt: skip
    yield made
    made.close()


def check(cores: Cores, seed: int, batches: int, most: int = 14, longest: int = 0) -> int:
    """That many random batches, of up to ``most`` of 24 requests. Returns how many requests were preempted."""
    draw = random.Random(seed)
    every = requests(draw, 24, longest)
    alone = {r.id: finish(cores.alone, [r])[r.id] for r in every}
    before = sum(core.scheduler.preemptions for core in cores.beside)
    cached = 0
    for _ in range(batches):
        some = draw.sample(every, draw.randint(2, most))
        found = finish(draw.choice(cores.beside), some)
        cached += sum(r.cached for r in found.values())
        for r in some:
            assert told(found[r.id]) == told(alone[r.id]), f"seed {seed}: request {r.id} of {[o.id for o in some]}"
    assert cached
    return sum(core.scheduler.preemptions for core in cores.beside) - before


def told(result: Result) -> Mapping[str, Any]:
    """All that a request gets, numbers as they are."""
    return {"tokens": result.tokens, "logprobs": result.logprobs, "prompt_logprobs": result.prompt_logprobs}


@pytest.mark.thorough
def test_requests_get_what_they_get_alone(cores: Cores) -> None:
    assert check(cores, 1, BATCHES)


@pytest.mark.slow
def test_requests_get_what_they_get_alone_in_500_batches(cores: Cores) -> None:
    for seed in range(2, 12):
        assert check(cores, seed, 50)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"backend": "eager"}, "backend eager depend on the batch; use inductor"),
        ({"num_speculative_tokens": 3}, "num_speculative_tokens is 3.*leave them out"),
        ({"buckets": "decode-1,mixed-2-2048"}, "use mixed-1-2048, or leave them out"),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        artifact_of(MODEL_DIR, **SETTINGS, **settings)
