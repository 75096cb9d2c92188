"""Answers of OpenAI's API as OpenAI's client reads them: log-probabilities, echo, reasoning, calls, usage, failures."""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Any

import numpy as np
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from graphllm.chat.answers import completion_logprobs, response_body
from graphllm.chat.call import CHAT, COMPLETIONS, Call, Style, parse_call, write_out
from graphllm.chat.reading import Reading, failure
from graphllm.chat.replies import CallStart, Reasoning, ReplyFormat, Text, Usage, merged
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.requests.outputs import CompletionOutput, Logprob, OutputProcessor, RequestMetrics, RequestOutput
from graphllm.engine.requests.processor import Processor
from graphllm.engine.requests.text import Tokenizer
from graphllm.entrypoints.driver import Driver
from tests.engine import byte_tokenizer
from tests.engine.stub_core import StubCore, info, log_softmax

OPEN = SamplingParams(max_tokens=None)
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer.make(tmp_path_factory.mktemp("tokenizer"))


def _chat(**fields: Any) -> Call:
    return parse_call(CHAT, {"model": "m", "messages": HELLO, **fields}, OPEN)


def _completion(**fields: Any) -> Call:
    return parse_call(COMPLETIONS, {"model": "m", "prompt": "hello", **fields}, OPEN)


def _answers(call: Call, tokenizer: Tokenizer) -> list[RequestOutput]:
    """From a core with random logits."""
    core = _core(tokenizer)
    processor = Processor(tokenizer, core.info, seed=1)
    _, prompts = write_out(call, tokenizer, Style())
    parsed = [processor.make(prompt, call.params, str(i)) for i, prompt in enumerate(prompts)]
    return Driver(core, processor, OutputProcessor(tokenizer)).finish(parsed)


@cache
def _logits(tokenizer: Tokenizer) -> np.ndarray:
    """[V, V], by the token before the last one."""
    return np.random.default_rng(0).normal(size=(tokenizer.vocab_size, tokenizer.vocab_size))


@cache
def _core(tokenizer: Tokenizer) -> StubCore:
    size = tokenizer.vocab_size
    return StubCore(info(size), np.broadcast_to(_logits(tokenizer)[:, None], (size, size, size)))


def _extras(model: Any) -> set[str]:
    """Fields that the client's models do not know, anywhere in a response."""
    found = set(model.model_extra or {})
    for name in type(model).model_fields:
        value = getattr(model, name)
        for part in value if isinstance(value, list) else [value]:
            if hasattr(part, "model_fields_set"):
                found |= _extras(part)
    return found


def test_chat_response(tokenizer: Tokenizer) -> None:
    """The client reads it, strictly, and finds what was generated."""
    call = _chat(n=2, seed=3, max_tokens=5, temperature=1.0, logprobs=True, top_logprobs=3, ignore_eos=True)
    outputs = _answers(call, tokenizer)
    body = json.loads(json.dumps(response_body(call, outputs, "17", "served", 1234)))
    read = ChatCompletion.model_validate(body, strict=True)
    assert _extras(read) == {"stop_reason"}
    assert (read.id, read.object, read.created, read.model) == ("chatcmpl-17", "chat.completion", 1234, "m")
    assert [c.index for c in read.choices] == [0, 1]
    assert [c.message.content for c in read.choices] == [c.text for c in outputs[0].outputs]
    assert all(c.message.role == "assistant" and c.finish_reason == "length" for c in read.choices)
    assert read.usage is not None
    prompt = len(tokenizer.encode("<s>user:hello;bot:"))
    usage = (read.usage.prompt_tokens, read.usage.completion_tokens, read.usage.total_tokens)
    assert usage == (prompt, 10, prompt + 10)
    assert read.usage.prompt_tokens_details is not None
    assert read.usage.prompt_tokens_details.cached_tokens == prompt // 2  # what the stub claims
    for choice, completion in zip(read.choices, outputs[0].outputs, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        known = [*outputs[0].prompt_token_ids, *completion.token_ids]
        for i, entry in enumerate(choice.logprobs.content):
            row = log_softmax(_logits(tokenizer))[known[prompt + i - 2]]
            token = completion.token_ids[i]
            assert entry.token == tokenizer.decode([token], skip_special_tokens=False)
            assert "\ufffd" in entry.token or entry.bytes == list(entry.token.encode())
            assert math.isclose(entry.logprob, row[token])
            best = np.argsort(-row)[:3]
            assert [t.token for t in entry.top_logprobs] == [tokenizer.decode([int(b)], False) for b in best]
            assert np.allclose([t.logprob for t in entry.top_logprobs], row[best])


def test_completion_response(tokenizer: Tokenizer) -> None:
    call = _completion(prompt=["hello", "cat"], n=2, seed=3, max_tokens=4, temperature=1.0, logprobs=2, ignore_eos=True)
    outputs = _answers(call, tokenizer)
    body = json.loads(json.dumps(response_body(call, outputs, "17", "served", 1234)))
    read = Completion.model_validate(body, strict=True)
    assert _extras(read) == {"stop_reason"}
    assert (read.id, read.object, read.model) == ("cmpl-17", "text_completion", "m")
    assert [c.index for c in read.choices] == [0, 1, 2, 3]
    completions = [c for o in outputs for c in o.outputs]
    assert [c.text for c in read.choices] == [c.text for c in completions]
    assert read.usage is not None
    prompt = len(tokenizer.encode("hello")) + len(tokenizer.encode("cat"))
    assert (read.usage.prompt_tokens, read.usage.completion_tokens) == (prompt, 16)
    for choice, completion in zip(read.choices, completions, strict=True):
        logprobs = choice.logprobs
        assert logprobs is not None
        assert logprobs.tokens == [tokenizer.decode([t], skip_special_tokens=False) for t in completion.token_ids]
        assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(4)]
        assert logprobs.token_logprobs is not None
        assert math.isclose(sum(logprobs.token_logprobs), completion.cumulative_logprob or 0)
        assert logprobs.top_logprobs is not None
        for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
            assert top[token] == logprob  # the token itself is among them
            assert len(top) in (2, 3)


def test_what_was_not_asked_for_is_null(tokenizer: Tokenizer) -> None:
    for call in (_chat(max_tokens=2, seed=1), _completion(max_tokens=2, seed=1)):
        body = response_body(call._replace(model=""), _answers(call, tokenizer), "1", "served", 0)
        assert body["choices"][0]["logprobs"] is None
        assert "prompt_logprobs" not in body
        assert "prompt_logprobs" not in body["choices"][0]
        assert body["model"] == "served"


def test_prompt_logprobs(tokenizer: Tokenizer) -> None:
    chat, completion = _chat(max_tokens=1, prompt_logprobs=1), _completion(max_tokens=1, prompt_logprobs=1)
    body = response_body(completion, _answers(completion, tokenizer), "1", "", 0)
    first, *others = body["choices"][0]["prompt_logprobs"]
    ids = tokenizer.encode("hello")
    assert first is None
    scores = log_softmax(_logits(tokenizer))
    for i, entry in enumerate(others, 1):
        found = entry[str(ids[i])]
        assert math.isclose(found["logprob"], scores[ids[i - 2] if i > 1 else 0, ids[i]])
        assert found["decoded_token"] == tokenizer.decode([ids[i]], skip_special_tokens=False)
    assert "prompt_logprobs" in response_body(chat, _answers(chat, tokenizer), "1", "", 0)


def test_stop_reason(tokenizer: Tokenizer) -> None:
    """The stop string that ended a completion, beside finish_reason."""
    text = _answers(_completion(max_tokens=8, temperature=0, ignore_eos=True), tokenizer)[0].outputs[0].text
    call = _completion(max_tokens=8, temperature=0, ignore_eos=True, stop=[text[2:4]])
    (choice,) = response_body(call, _answers(call, tokenizer), "1", "", 0)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.find(text[2:4])], "stop")
    assert choice["stop_reason"] == text[2:4]


def test_impossible_tokens_are_valid_json() -> None:
    """JSON has no infinity; tokens that read the same keep the likeliest."""
    position = {5: Logprob(-math.inf, 9, "x"), 6: Logprob(-0.5, 1, "y"), 7: Logprob(-1.5, 2, "y")}
    body = completion_logprobs([position])
    assert body["token_logprobs"] == [-9999.0]
    assert body["top_logprobs"] == [{"x": -9999.0, "y": -0.5}]
    json.dumps(body, allow_nan=False)


# --- echo


def _echo(tokenizer: Tokenizer, **fields: Any) -> tuple[list[RequestOutput], Completion]:
    call = _completion(echo=True, seed=3, ignore_eos=True, **fields)
    outputs = _answers(call, tokenizer)
    body = response_body(call, outputs, "17", "served", 1234)
    # Nothing is known of a first token: null, as OpenAI has it, which its client takes and its types do not tell.
    known = json.loads(json.dumps(body))
    for logprobs in (c["logprobs"] for c in known["choices"] if c["logprobs"]):
        assert logprobs["token_logprobs"].pop(0) is logprobs["top_logprobs"].pop(0) is None
    Completion.model_validate(known, strict=True)
    return outputs, Completion.construct(**body)


def test_echo(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a cat")
    outputs, read = _echo(tokenizer, prompt=[ids, tokenizer.encode("hi")], max_tokens=3, n=2, temperature=1.0)
    completions = [c for output in outputs for c in output.outputs]
    assert [c.text for c in read.choices] == [
        prompt + c.text for prompt, c in zip(["a cat"] * 2 + ["hi"] * 2, completions, strict=True)
    ]
    assert read.usage is not None
    assert (read.usage.prompt_tokens, read.usage.completion_tokens) == (len(ids) + len(tokenizer.encode("hi")), 12)


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echo_with_logprobs(max_tokens: int, tokenizer: Tokenizer) -> None:
    """The prompt's tokens and those behind it as one text, each with the probability that those before it gave it."""
    ids = [byte_tokenizer.BOS, *tokenizer.encode("hello the cat")]
    outputs, read = _echo(tokenizer, prompt=ids, max_tokens=max_tokens, logprobs=2)
    known = [*ids, *outputs[0].outputs[0].token_ids][: len(ids) + max_tokens]
    (choice,) = read.choices
    assert (choice.finish_reason, choice.text) == ("length", tokenizer.decode(known, skip_special_tokens=False))
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens == [tokenizer.decode([i], skip_special_tokens=False) for i in known]
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(len(known))]
    scores = log_softmax(_logits(tokenizer))
    first, *others = logprobs.token_logprobs or []
    expected = [scores[known[i - 2] if i > 1 else 0, known[i]] for i in range(1, len(known))]
    assert first is None
    assert np.allclose(np.array(others, np.float64), expected)
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] is None
    assert all(len(top) in (2, 3) for top in logprobs.top_logprobs[1:])
    assert read.usage is not None
    assert (read.usage.prompt_tokens, read.usage.completion_tokens) == (len(ids), max_tokens)


def test_echo_without_a_token_and_without_logprobs(tokenizer: Tokenizer) -> None:
    _, read = _echo(tokenizer, max_tokens=0)
    assert [(c.text, c.finish_reason, c.logprobs) for c in read.choices] == [("hello", "length", None)]


# --- reasoning and calls


def _output(text: str, reason: str | None = "stop", stop: int | str | None = None, tokens: int = 7) -> RequestOutput:
    completion = CompletionOutput(0, text, [5] * tokens, finish_reason=reason, stop_reason=stop)
    return RequestOutput("1", None, [1, 2], None, [completion], reason is not None, RequestMetrics(0.0), 1)


def _read(call: Call, text: str, reason: str = "stop") -> Any:
    body = response_body(call, [_output(text, reason)], "17", "", 0, len)
    read = ChatCompletion.model_validate(json.loads(json.dumps(body)), strict=True)
    return read


HERMES = ReplyFormat(reasoning=True, tools="hermes", names=frozenset({"add"}))
CALLED = '<think>So.</think>Wait<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def test_reasoning_and_calls() -> None:
    call = _chat()._replace(reply=HERMES)
    (choice,) = _read(call, CALLED).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Wait")
    assert choice.message.model_extra == {"reasoning": "So.", "reasoning_content": "So."}
    (made,) = choice.message.tool_calls
    assert (made.type, made.function.name, json.loads(made.function.arguments)) == ("function", "add", {"a": 1})
    assert _read(call, CALLED).usage.completion_tokens_details.reasoning_tokens == len("So.")
    assert _read(call, CALLED, "length").choices[0].finish_reason == "length"
    assert _read(call, CALLED[CALLED.index("<tool") :]).choices[0].message.content is None
    assert _read(call, "").choices[0].message.content == ""
    assert _read(call._replace(reasoning=False), CALLED).choices[0].message.model_extra == {}
    assert _read(_chat(), CALLED).choices[0].message.content == CALLED


def test_ids_of_calls() -> None:
    """Unlike each other; and as short as Mistral's templates want them."""
    one = '{"name": "add", "arguments": {"a": 1}}'
    hermes, mistral = f"<tool_call>{one}</tool_call>" * 2, f"[TOOL_CALLS][{one}, {one}]"
    for style, text, length in (("hermes", hermes, 29), ("mistral", mistral, 9)):
        call = _chat()._replace(reply=HERMES._replace(tools=style))
        made = _read(call, text).choices[0].message.tool_calls
        assert len({c.id for c in made}) == 2
        assert all(len(c.id) == length and c.id.isascii() for c in made)


def test_reading_an_answer_in_pieces() -> None:
    """For the APIs that are no OpenAI chat: the parts, the usage so far, the end."""
    reading = Reading(_chat()._replace(reply=HERMES), len)
    parts = []
    for text in ("<think>S", "o.</think>Wa", "it"):
        parts += reading.read(_output(text, None))
    assert merged(parts)[:2] == ("So.", "Wait")
    assert reading.usage == Usage(2, 21, 1, 0)
    parts += reading.read(_output('<tool_call>{"name": "add", "arguments": {}}</tool_call>'))
    assert [type(part) for part in parts[-2:-1]] == [CallStart]
    assert {type(part) for part in parts} >= {Reasoning, Text}
    assert reading.ending == ("tool_calls", Usage(2, 28, 1, len("So.")), None, None)
    other = Reading(_chat(), len)
    other.read(_output("x", "stop", "end"))
    assert other.ending == ("stop", Usage(2, 7, 1), "end", None)


def test_failure_of_the_engine() -> None:
    def output(*reasons: str) -> RequestOutput:
        parts = [
            CompletionOutput(i, "", [], finish_reason=r, error="NaN" if r == "error" else None)
            for i, r in enumerate(reasons)
        ]
        return RequestOutput("1", None, [1], None, parts, True, RequestMetrics(0.0))

    assert failure([output("stop", "length"), output("stop")]) is None
    assert failure([output("stop"), output("stop", "error")]) == ("NaN", False)
