"""Stop strings are about the answer: text that has thinking before it, by a few lines that look at it as a whole."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from graphllm.config.requests.sampling_params import RequestOutputKind, SamplingParams
from graphllm.engine.requests.outputs import OutputProcessor
from graphllm.engine.requests.processor import Processor
from graphllm.engine.requests.request import EngineCoreOutput
from graphllm.engine.requests.text import Tokenizer
from tests.engine.byte_tokenizer import make
from tests.engine.stub_core import info
from tests.tiers import draws

PIECES = ("<think>", "</think>", "<thi", "nk>", "</", "think>", "a", "b", "ab", " ", "\n", "é")
STOPS = ("a", "ab", "b a", "<", "think>", "</think>", "\n", "é")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make(tmp_path_factory.mktemp("bytes"))


def answered(
    tokenizer: Tokenizer, text: str, stop: str, thinking: bool | None, how: RequestOutputKind
) -> tuple[str, str | None]:
    """The text that is seen, all of it, and what ended it."""
    params = SamplingParams(max_tokens=None, stop=[stop], output_kind=how)
    prompt = {"prompt": "x"} if thinking is None else {"prompt": "x", "thinking": thinking}
    outputs = OutputProcessor(tokenizer)
    outputs.add(Processor(tokenizer, info(320, max_model_len=1 << 12, capacity=1 << 12)).make(prompt, params, "r"))
    ids = tokenizer.encode(text, add_special_tokens=False)
    seen = ""
    for i, token in enumerate(ids, 1):
        found = outputs.process([EngineCoreOutput("r", [token], "length" if i == len(ids) else None)])
        for output in found.outputs:
            (completion,) = output.outputs
            seen = seen + completion.text if how is RequestOutputKind.DELTA else completion.text
            if output.finished:
                return seen, completion.stop_reason
    raise AssertionError


def expected(text: str, stop: str, thinking: bool | None) -> tuple[str, str | None]:
    begin = 0
    if thinking or (thinking is False and text.lstrip().startswith("<think>")):
        before, closed, _ = text.partition("</think>")
        begin = len(before + closed) if closed else len(text)
    elif thinking is False and "<think>".startswith(text.lstrip()):
        begin = len(text)  # it ends before anybody knows
    at = text.find(stop, begin)
    return (text, None) if at < 0 else (text[:at], stop)


@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=12).map("".join),
       st.sampled_from(STOPS), st.sampled_from([None, False, True]),
       st.sampled_from(list(RequestOutputKind)))  # fmt: skip
@example("<think>The Question: is easy.</think>Four.", "Question:", False, RequestOutputKind.DELTA)
@example("<think>The Question: is easy.</think>Four. Question: x", "Question:", False, RequestOutputKind.DELTA)
@example("is easy.</think>Four.is easy", "is easy", True, RequestOutputKind.FINAL_ONLY)
@example("\n\nFour.", "\n", False, RequestOutputKind.CUMULATIVE)
@example("<thing>", "<", False, RequestOutputKind.DELTA)
@settings(deadline=None, max_examples=draws(150, 2000))
def test_stop_strings_are_about_the_answer(
    tokenizer: Tokenizer, text: str, stop: str, thinking: bool | None, how: RequestOutputKind
) -> None:
    assert answered(tokenizer, text, stop, thinking, how) == expected(text, stop, thinking)
