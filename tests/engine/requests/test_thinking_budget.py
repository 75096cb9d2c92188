"""A limit of thinking, on a model whose tokenizer has the tags: what is forced when, and what is not touched."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphllm import LLM, SamplingParams
from graphllm.chat.infill import infilled
from graphllm.config import ConfigError
from graphllm.engine.requests.request import ThinkingBudget

_TAGS = {"<|user|>": "<think>", "<|bot|>": "</think>", "<|system|>": "<|fim_prefix|>"}


@pytest.fixture(scope="module")
def thinker(checkpoint: Path, eager_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The tiny model, with other names for some of its tokens."""
    folder = tmp_path_factory.mktemp("thinker") / "model"
    shutil.copytree(checkpoint, folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / file).read_text()
        for token, other in _TAGS.items():
            text = text.replace(token, other)
        (folder / file).write_text(text)
    with LLM(folder, artifact=str(eager_artifact)) as llm:
        yield llm


def _ids(llm: LLM, prompt: str, **fields: Any) -> list[int]:
    params = SamplingParams(**{"max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields})
    return llm.generate([prompt], params)[0].outputs[0].token_ids


def test_thinking_ends_at_its_limit(thinker: LLM) -> None:
    end = thinker.get_tokenizer().token_id("</think>")
    prompt = "<think> hello world"
    free = _ids(thinker, prompt)
    assert end not in free
    for budget in (0, 1, 5):
        limited = _ids(thinker, prompt, thinking_token_budget=budget)
        assert limited[: budget + 1] == [*free[:budget], end]
        assert end not in limited[budget + 1 :]
    assert _ids(thinker, prompt, thinking_token_budget=12) == free


def test_who_does_not_think_is_left_alone(thinker: LLM) -> None:
    for prompt in ("hello world", "<think> hello </think> world"):
        assert _ids(thinker, prompt, thinking_token_budget=2) == _ids(thinker, prompt)


def test_thinking_that_begins_in_the_output() -> None:
    budget = ThinkingBudget(tokens=2, start=7, end=8, begun=False)
    outputs = [[], [1], [1, 7], [1, 7, 2], [1, 7, 2, 3], [1, 7, 8, 3, 4], [1, 7, 2, 3, 8, 5]]
    assert [budget.forced(output) for output in outputs] == [None, None, None, None, 8, None, None]


def test_a_grammar_holds_behind_the_thinking(thinker: LLM) -> None:
    tokenizer = thinker.get_tokenizer()
    end, prompt, choice = tokenizer.token_id("</think>"), "<think> hello world", {"choice": ["hello"]}
    free = _ids(thinker, prompt)
    for budget in (0, 1, 5):
        ids = _ids(thinker, prompt, structured_outputs=choice, thinking_token_budget=budget, ignore_eos=False)
        assert ids[: budget + 1] == [*free[:budget], end]
        assert tokenizer.decode(ids[budget + 1 :], skip_special_tokens=False) == "hello</s>"
    at_once = _ids(thinker, prompt, structured_outputs=choice, ignore_eos=False)
    assert tokenizer.decode(at_once, skip_special_tokens=False) == "hello</s>"


def test_thinking_does_not_end_the_answer(thinker: LLM) -> None:
    """A model that would stop within its thinking gives what was asked for."""
    fields: Any = {"thinking_token_budget": 3, "structured_outputs": {"choice": ["hello"]}, "ignore_eos": False}
    bias = {thinker.get_tokenizer().token_id("</s>"): 100.0}
    params = SamplingParams(max_tokens=12, temperature=0, logit_bias=bias, **fields)
    output = thinker.generate(["<think> hello world"], params)[0].outputs[0]
    assert (output.text[-5:], output.finish_reason, len(output.token_ids) > 4) == ("hello", "stop", True)


def test_a_grammar_leaves_no_place_to_begin_thinking(thinker: LLM) -> None:
    params = SamplingParams(max_tokens=4, thinking_token_budget=0, structured_outputs={"choice": ["hello"]})
    assert thinker.generate(["the"], params)[0].outputs[0].text == "hello"


def test_some_of_the_marks_are_not_enough_to_fill_a_gap(thinker: LLM) -> None:
    with pytest.raises(ConfigError, match="suffix is 'b': the model has no tokens for filling a gap"):
        infilled("a", "b", thinker.get_tokenizer())


class _Marks:
    def token_id(self, token: str) -> int | None:
        return {"<fim_prefix>": 1, "<fim_suffix>": 2, "<fim_middle>": 3}.get(token)


def test_a_gap() -> None:
    tokenizer: Any = _Marks()
    assert infilled("def f():", "return x", tokenizer) == "<fim_prefix>def f():<fim_suffix>return x<fim_middle>"
    with pytest.raises(ConfigError, match="give the prompt as text"):
        infilled([1, 2], "b", tokenizer)
