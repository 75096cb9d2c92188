"""Requests as cores get them: what is filled in, and every mistake found before anything runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import SamplingParams, StructuredOutputsParams
from graphllm.engine.requests.processor import Processor
from graphllm.engine.requests.text import Tokenizer
from tests.engine.byte_tokenizer import BOS, END, EOS, make
from tests.engine.stub_core import info

PLAIN = SamplingParams()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def processor(tokenizer: Tokenizer) -> Processor:
    return Processor(tokenizer, info(tokenizer.vocab_size))


class Grammar:
    """Takes every constraint but the regular expression "bad"."""

    def check(self, spec: StructuredOutputsParams) -> None:
        if spec.regex == "bad":
            raise ConfigError("structured_outputs.regex is 'bad'")


def test_prompts(processor: Processor, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello")
    cases: list[tuple[Any, str | None]] = [
        ("Hello", "Hello"),
        (ids, None),
        (tuple(ids), None),
        ({"prompt": "Hello"}, "Hello"),
        ({"prompt_token_ids": ids}, None),
        ({"prompt": "as written", "prompt_token_ids": ids}, "as written"),
    ]
    for prompt, text in cases:
        parsed = processor.make(prompt, PLAIN, "r")
        assert (parsed.prompt, parsed.prompt_token_ids) == (text, ids)
        (request,) = parsed.requests
        assert (request.id, request.prompt, request.fork_of, request.params) == ("r", ids, "", PLAIN)


def test_what_is_passed_on(processor: Processor) -> None:
    first = processor.make("Hello", PLAIN, "a", priority=-3, cache_salt="s").requests[0]
    second = processor.make({"prompt": "Hello", "cache_salt": "t"}, PLAIN, "b").requests[0]
    assert (first.priority, first.cache_salt, second.priority, second.cache_salt) == (-3, "s", 0, "t")
    assert 0 < first.arrival <= second.arrival
    assert first.seed != second.seed


def test_completions(processor: Processor) -> None:
    parsed = processor.make("Hello", SamplingParams(n=3, seed=2**63 - 2), "r")
    assert [r.id for r in parsed.requests] == ["0_r", "1_r", "2_r"]
    assert [r.fork_of for r in parsed.requests] == ["", "0_r", "0_r"]
    assert [r.seed for r in parsed.requests] == [2**63 - 2, 2**63 - 1, -(2**63)]
    free = processor.make("Hello", SamplingParams(n=3), "r").requests
    assert [r.seed - free[0].seed for r in free] == [0, 1, 2]


def test_seeds_of_requests_without_one(tokenizer: Tokenizer) -> None:
    def seeds(seed: int | None) -> list[int]:
        made = Processor(tokenizer, info(tokenizer.vocab_size), seed=seed)
        return [made.make("a", PLAIN, str(i)).requests[0].seed for i in range(3)]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2), *seeds(None), *seeds(None)}) == 12


def test_stop_ids(processor: Processor) -> None:
    parsed = processor.make("a", SamplingParams(stop_token_ids=[9, EOS]), "r")
    assert (parsed.requests[0].stop_ids, parsed.eos_ids) == ([EOS, END, 9], {EOS, END})
    parsed = processor.make("a", SamplingParams(stop_token_ids=[9, EOS], ignore_eos=True), "r")
    assert (parsed.requests[0].stop_ids, parsed.eos_ids) == ([EOS, 9], frozenset())


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "capacity", "limit"),
    [(1, 5, 256, 5), (1, None, 256, 63), (60, 100, 256, 4), (63, None, 256, 1), (4, None, 10, 6), (4, 6, 10, 6)],
)
def test_limit(tokenizer: Tokenizer, prompt: int, max_tokens: int | None, capacity: int, limit: int) -> None:
    made = Processor(tokenizer, info(tokenizer.vocab_size, capacity=capacity))
    (request,) = made.make([7] * prompt, SamplingParams(max_tokens=max_tokens), "r").requests
    assert request.limit == limit


def test_prompt_logprobs_compute_the_prompt(processor: Processor) -> None:
    def skips(**fields: Any) -> bool | None:
        return processor.make("a", SamplingParams(**fields), "r").requests[0].params.skip_reading_prefix_cache

    assert skips() is None
    assert skips(prompt_logprobs=0) is True
    assert skips(prompt_logprobs=0, skip_reading_prefix_cache=False) is False
    assert skips(skip_reading_prefix_cache=True) is True


def test_log_probabilities_up_to_the_limit(processor: Processor) -> None:
    for count in (0, 20, -1):
        processor.make("a", SamplingParams(logprobs=count, prompt_logprobs=count), "r")


def test_structured_outputs(tokenizer: Tokenizer) -> None:
    made = Processor(tokenizer, info(tokenizer.vocab_size), Grammar())
    good, bad = (SamplingParams(structured_outputs=StructuredOutputsParams(regex=r)) for r in ("good", "bad"))
    assert made.make("a", good, "r").requests[0].params == good
    with pytest.raises(ConfigError, match="regex is 'bad'"):
        made.make("a", bad, "r")
    with pytest.raises(ConfigError, match="structured_outputs: not available without a tokenizer"):
        Processor(None, info(300)).make([1], good, "r")


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ("", {}, "prompt is empty: give at least one token"),
        ([], {}, "prompt is empty"),
        ({}, {}, "prompt is missing: give text, or token ids as prompt_token_ids"),
        ({"prompt": 3}, {}, "prompt is 3: give text"),
        ({"text": "a"}, {}, r"prompt has \['text'\]: give \['add_special_tokens', 'cache_salt', 'prompt', '"),
        (["a"], {}, r"prompt is \['a'\]: give text or a list of token ids"),
        ([1.0], {}, r"prompt is \[1.0\]: give"),
        ([True], {}, r"prompt is \[True\]: give"),
        (7, {}, "prompt is 7: give text or a list"),
        ([1] * 64, {}, "prompt has 64 tokens: the context holds 64 .*shorten it, or compile with a larger --max-"),
        ([1, 10**6], {}, r"prompt has token id 1000000: give ids from 0 to \d+"),
        ([1, -1], {}, "prompt has token id -1: give"),
        ("a", {"logprobs": 21}, "logprobs is 21: give at most 20, or -1"),
        ("a", {"prompt_logprobs": 21}, "prompt_logprobs is 21: give at most 20, or -1"),
        ("a", {"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias has 1025 entries: give at most 1024"),
        ("a", {"logit_bias": {10**6: 1.0}}, "logit_bias has token id 1000000: give"),
        ("a", {"allowed_token_ids": [1, 10**6]}, "allowed_token_ids has token id 1000000: give"),
        ("a", {"stop_token_ids": [10**6]}, "stop_token_ids has token id 1000000: give"),
        ([1] * 60, {"min_tokens": 5}, "min_tokens is 5: there is room for 4 after this prompt"),
    ],
)  # fmt: skip
def test_mistakes(processor: Processor, prompt: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        processor.make(prompt, SamplingParams(**fields), "r")


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (4, 7, "max_tokens is 7: 4 prompt tokens and 7 of output are more than the 10 that the cache holds; lower"),
        (10, 1, "max_tokens is 1: 10 prompt tokens and 1 of output are more than the 10"),
        (10, None, "max_tokens is None: 10 prompt tokens and 1 of output are more than the 10"),
    ],
)
def test_more_than_the_cache(tokenizer: Tokenizer, prompt: int, max_tokens: int | None, message: str) -> None:
    made = Processor(tokenizer, info(tokenizer.vocab_size, capacity=10))
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        made.make([7] * prompt, SamplingParams(max_tokens=max_tokens), "r")


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ("a", {}, "prompt is text and there is no tokenizer; give prompt_token_ids"),
        ([1], {"stop": "a"}, r"stop is \('a',\): there is no tokenizer to find it with; give stop_token_ids"),
        ([1], {"bad_words": "a"}, r"bad_words is \('a',\): there is no tokenizer; leave it out"),
    ],
)
def test_without_a_tokenizer(prompt: Any, fields: dict[str, Any], message: str) -> None:
    made = Processor(None, info(10))
    with pytest.raises(ConfigError, match=f"^{message}"):
        made.make(prompt, SamplingParams(**fields), "r")
    parsed = made.make([BOS], SamplingParams(stop_token_ids=[4]), "r")
    assert (parsed.requests[0].stop_ids, parsed.eos_ids) == ([4], frozenset())


def test_end_tokens_beyond_the_model(tmp_path: Path) -> None:
    """A tokenizer may know more tokens than the model; those never come and are no row of its masks."""
    parsed = Processor(make(tmp_path), info(2)).make([0], PLAIN, "r")
    assert parsed.requests[0].stop_ids == [EOS]
