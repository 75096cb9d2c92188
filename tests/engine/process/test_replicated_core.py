"""`LLM` and `AsyncLLM` over two engine cores give transformers' greedy text; what one core's death leaves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphllm.config import ConfigError, EngineArgs
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.embedded import MODEL_DIR
from graphllm.entrypoints.async_llm import AsyncLLM
from graphllm.entrypoints.llm import LLM
from tests.artifacts import artifact_of
from tests.engine.test_embedded_engine import SIZES, TOKENS, _answers

GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS)
ENDLESS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def place() -> Path:
    return artifact_of(MODEL_DIR, **SIZES)


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, ...], list[int]]:
    return _answers(MODEL_DIR, [f"What is {a} + {b}?" for a in range(11, 17) for b in (7, 23)])


@pytest.fixture(scope="module")
def llm(place: Path) -> Iterator[LLM]:
    with LLM(artifact=place, data_parallel_size=2) as made:
        yield made


def by_core(llm: LLM) -> list[int]:
    return [stats.generated_tokens for stats in llm.llm_engine.core.engine_stats()]  # type: ignore[attr-defined]


def text(llm: LLM, tokens: list[int]) -> list[int]:
    """Without what ends it and what comes after that."""
    stops = llm.get_tokenizer().stop_ids
    return tokens[: next((i for i, token in enumerate(tokens) if token in stops), len(tokens))]


def test_greedy_text_of_two_cores(llm: LLM, expected: dict[tuple[int, ...], list[int]]) -> None:
    before = by_core(llm)
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in expected], GREEDY, use_tqdm=False)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert [text(llm, tokens) for tokens in found] == [text(llm, tokens) for tokens in expected.values()]
    made = [after - was for after, was in zip(by_core(llm), before, strict=True)]
    assert min(made) > 0.3 * sum(made), made
    assert sum(made) == sum(map(len, found))


def test_siblings_seeds_and_constraints(llm: LLM, place: Path) -> None:
    """As one core gives them."""
    params = [
        SamplingParams(n=3, temperature=0.9, seed=4, max_tokens=12),
        SamplingParams.from_fields({"structured_outputs": {"regex": "[a-c]{5}"}, "max_tokens": 12}, SamplingParams()),
    ] * 3
    prompts = [f"Tell me {n} things." for n in range(6)]
    found = llm.generate(prompts, params, use_tqdm=False)
    with LLM(artifact=place) as alone:
        wanted = alone.generate(prompts, params, use_tqdm=False)
    texts = [[[c.text for c in one.outputs] for one in several[::2]] for several in (found, wanted)]
    assert texts[0] == texts[1]
    assert all(len(one.outputs[0].text) == 5 and set(one.outputs[0].text) <= set("abc") for one in found[1::2])


def test_metrics_and_the_cache_are_of_both(llm: LLM) -> None:
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    assert metrics["vllm:generation_tokens"].value == sum(by_core(llm))  # type: ignore[attr-defined]
    prompt = "One two three four five six seven eight nine ten. " * 3
    cached = [llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens for _ in range(3)]
    assert cached[0] == 0
    assert min(cached[1:]) > 0  # the same core, by the prefix
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_a_core_that_is_killed(place: Path) -> None:
    with LLM(artifact=place, data_parallel_size=2) as llm:
        clients = llm.llm_engine.core._client._clients  # type: ignore[attr-defined]
        victim, count = clients[0].pid, 0

        class Bar:
            """Kills the core once the first request is done."""

            def __init__(self, **_: Any) -> None: ...
            def __enter__(self) -> Bar:
                return self

            def __exit__(self, *_: object) -> None: ...
            def update(self, _: int) -> None:
                nonlocal count
                if count == 0:
                    os.kill(victim, signal.SIGKILL)
                count += 1

        params = [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), *[ENDLESS] * 9]
        outputs = llm.generate([f"{n}" for n in range(10)], params, use_tqdm=Bar)
        reasons = [output.outputs[0].finish_reason for output in outputs]
        assert reasons.count("error") in (4, 5), reasons  # five were there; the short one may have been among them
        failed = [output.outputs[0].error for output in outputs if output.outputs[0].finish_reason == "error"]
        assert all("killed by signal 9" in str(error) for error in failed)
        assert all(len(o.outputs[0].token_ids) == 200 for o in outputs[1:] if o.outputs[0].finish_reason == "length")
        assert llm.generate("What is 2 + 3?", GREEDY, use_tqdm=False)[0].outputs[0].finish_reason in ("stop", "length")


def test_the_same_for_streams(place: Path, expected: dict[tuple[int, ...], list[int]]) -> None:
    async def main() -> None:
        engine = AsyncLLM.from_engine_args(EngineArgs(artifact=place, data_parallel_size=2))
        await engine.start()
        try:

            async def one(number: int, prompt: tuple[int, ...]) -> list[int]:
                tokens: list[int] = []
                async for output in engine.generate({"prompt_token_ids": list(prompt)}, GREEDY, f"{number}"):
                    tokens = list(output.outputs[0].token_ids)
                return tokens

            found = await asyncio.gather(*(one(n, prompt) for n, prompt in enumerate(expected)))
            for tokens, wanted in zip(found, expected.values(), strict=True):
                assert tokens == wanted[: len(tokens)]
            assert all(stats and stats.generated_tokens for stats in await engine.cores.stats())
        finally:
            await engine.close()

    asyncio.run(main())


def test_run_over_two_cores(place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from graphllm.cli.app import app

    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": f"What is {n} + 1?"}) + "\n" for n in range(8)))
    answers = []
    for count in (1, 2):
        output = tmp_path / f"out-{count}.jsonl"
        words = ["run", str(tmp_path / "in.jsonl"), "--artifact", str(place), "--temperature", "0", "-o", str(output)]
        app([*words, "--data-parallel-size", str(count), "--quiet"], standalone_mode=False)
        answers.append([json.loads(line)["text"] for line in output.read_text().splitlines()])
    assert answers[0] == answers[1]
    assert len(answers[0]) == 8


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size is 0: it must be at least 1"),
        ({"data_parallel_size": 2, "data_parallel_rank": 2}, "data_parallel_rank is 2: ranks of data_parallel_size 2"),
        ({"data_parallel_size": 2, "logits_processors": [print]}, "functions cannot cross to the processes"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], told: str, place: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        LLM(artifact=place, **options)


@pytest.mark.slow
def test_two_cores_of_two_ranks_each(expected: dict[tuple[int, ...], list[int]]) -> None:
    """Every rank has its part of the weights, every core its part of the requests."""
    limits = {"max_model_len": 256, "max_num_seqs": 8, "block_size": 8, "buckets": "decode-1,decode-2-8,mixed-2-256"}
    with LLM(tensor_parallel_size=2, data_parallel_size=2, dtype="float32", target="cpu", **limits) as llm:
        outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in expected], GREEDY, use_tqdm=False)
        found = [text(llm, list(output.outputs[0].token_ids)) for output in outputs]
        assert found == [text(llm, tokens) for tokens in expected.values()]
        assert min(by_core(llm)) > 0.3 * sum(by_core(llm))
