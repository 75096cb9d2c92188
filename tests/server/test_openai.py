"""Bodies of OpenAI's API: what they ask for, what is refused by which name, responses as OpenAI's client reads them."""

from __future__ import annotations

import json
import math
from typing import Any

import byte_tokenizer
import numpy as np
import pytest
from stub_core import StubCore, info, log_softmax

from graphllm.config import ConfigError
from graphllm.engine.llm import run_to_completion
from graphllm.engine.outputs import CompletionOutput, Logprob, OutputProcessor, RequestMetrics, RequestOutput
from graphllm.engine.params import SamplingParams, StructuredOutputsParams
from graphllm.engine.processor import Processor
from graphllm.engine.text import Tokenizer
from graphllm.server.openai import (
    CHAT,
    COMPLETIONS,
    Call,
    completion_logprobs,
    error_body,
    failure,
    parse_call,
    prompts_of,
    response_body,
)

OPEN = SamplingParams(max_tokens=None)  # defaults that leave the length to the endpoint
HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer.make(tmp_path_factory.mktemp("tokenizer"))


def _chat(defaults: SamplingParams = OPEN, **fields: Any) -> Call:
    return parse_call(CHAT, {"model": "m", "messages": HELLO, **fields}, defaults)


def _completion(defaults: SamplingParams = OPEN, **fields: Any) -> Call:
    return parse_call(COMPLETIONS, {"model": "m", "prompt": "hello", **fields}, defaults)


# --- requests


def test_what_a_body_leaves_open() -> None:
    """A chat goes on to the end of the context, a completion has 16 tokens, unless the defaults say otherwise."""
    assert _chat().params == OPEN
    assert _completion().params == SamplingParams(max_tokens=16)
    defaults = SamplingParams(max_tokens=7, temperature=0.25, repetition_penalty=1.5)
    assert _chat(defaults).params == _completion(defaults).params == defaults
    assert _chat(defaults, temperature=None, max_tokens=None).params == defaults
    assert (_chat().model, _chat().messages, _completion().prompts) == ("m", HELLO, ["hello"])
    assert parse_call(CHAT, {"messages": HELLO}, OPEN).model == ""


def test_sampling_fields_of_both_endpoints() -> None:
    fields = {
        "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "n": 3, "stop": ["a", "b"], "seed": 11,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"7": 3, "9": -200}, "top_k": 4, "min_p": 0.1,
        "repetition_penalty": 1.1, "stop_token_ids": [3], "ignore_eos": True, "min_tokens": 2,
        "allowed_token_ids": [3, 7], "bad_words": ["x"], "skip_special_tokens": False,
        "spaces_between_special_tokens": False, "include_stop_str_in_output": True, "prompt_logprobs": 2,
        "structured_outputs": {"regex": "a+"},
    }  # fmt: skip
    expected = SamplingParams(
        max_tokens=5, temperature=0.5, top_p=0.9, n=3, stop=("a", "b"), seed=11, presence_penalty=0.5,
        frequency_penalty=-0.5, logit_bias={7: 3, 9: -100}, top_k=4, min_p=0.1, repetition_penalty=1.1,
        stop_token_ids=(3,), ignore_eos=True, min_tokens=2, allowed_token_ids=(3, 7), bad_words=("x",),
        skip_special_tokens=False, spaces_between_special_tokens=False, include_stop_str_in_output=True,
        prompt_logprobs=2, structured_outputs=StructuredOutputsParams(regex="a+"),
    )  # fmt: skip
    assert _chat(**fields).params == expected
    assert _completion(**fields).params == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_completion_tokens": 9}, {"max_tokens": 9}),
        ({"max_completion_tokens": 9, "max_tokens": 3}, {"max_tokens": 9}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
        ({"logprobs": True, "top_logprobs": -1}, {"logprobs": -1}),
        ({"logprobs": False, "top_logprobs": 0}, {"logprobs": None}),
        ({"stop": "end"}, {"stop": ("end",)}),
        ({"response_format": {"type": "text"}}, {}),
        (
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": StructuredOutputsParams(json_object=True)},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            {"structured_outputs": StructuredOutputsParams(json=SCHEMA)},
        ),
    ],
)  # fmt: skip
def test_fields_of_a_chat(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert _chat(**fields).params == SamplingParams(**{"max_tokens": None, **expected})


def test_logprobs_of_a_completion_are_a_number() -> None:
    assert [_completion(logprobs=k).params.logprobs for k in (0, 3, None)] == [0, 3, None]


def test_fields_that_change_nothing() -> None:
    """What clients send along, and values that ask for nothing."""
    inert = {
        "user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "stream": False, "stream_options": None,
        "echo": False, "suffix": None, "tools": [], "tool_choice": "none", "best_of": 1, "use_beam_search": False,
        "length_penalty": 1.0, "logprob_token_ids": None, "unheard_of": None,
    }  # fmt: skip
    assert _completion(**inert, add_special_tokens=True) == _completion()
    assert _chat(**inert, add_special_tokens=False, parallel_tool_calls=True) == _chat()


def test_the_other_fields_of_a_call() -> None:
    call = _chat(priority=3, cache_salt="s", chat_template_kwargs={"mood": "gay"}, add_generation_prompt=False)
    assert (call.priority, call.cache_salt) == (3, "s")
    assert call.template == {"mood": "gay", "add_generation_prompt": False}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), ([5, 6], [[5, 6]]), (["a", "b"], ["a", "b"]), ([[5], [6, 7]], [[5], [6, 7]]), ("", [""])],
)
def test_prompts_of_a_completion(prompt: Any, expected: list[Any], tokenizer: Tokenizer) -> None:
    assert list(prompts_of(_completion(prompt=prompt), tokenizer)) == expected


def test_a_chat_is_written_out_by_its_template(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    call = parse_call(
        CHAT,
        {"messages": [{"role": "user", "content": parts}], "chat_template_kwargs": {"mood": "!"}},
        OPEN,
    )
    prompt: Any = prompts_of(call, tokenizer)[0]
    assert prompt["prompt"] == "<s>user:one\ntwo;!bot:"
    ids = prompt["prompt_token_ids"]
    assert ids.count(byte_tokenizer.BOS) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>user:one\ntwo;!bot:"


@pytest.mark.parametrize(
    ("url", "fields", "param", "message"),
    [
        (CHAT, {"temperature": -1}, "temperature", "temperature is -1"),
        (CHAT, {"temperature": "hot"}, "temperature", "temperature is 'hot'"),
        (CHAT, {"frobnicate": 3}, "frobnicate", "frobnicate is 3: not supported"),
        (CHAT, {"stream": True}, "stream", "stream is True: not supported"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools", "tools is "),
        (CHAT, {"tool_choice": "auto"}, "tool_choice", "tool_choice is 'auto'"),
        (CHAT, {"echo": True}, "echo", "echo is True"),
        (CHAT, {"best_of": 2}, "best_of", "best_of is 2"),
        (CHAT, {"n": 0}, "n", "n is 0"),
        (CHAT, {"n": 2, "temperature": 0}, "n", "n is 2: with temperature 0"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "max_tokens is 0"),
        (CHAT, {"max_completion_tokens": "5"}, "max_completion_tokens", "max_completion_tokens is '5'"),
        (CHAT, {"logprobs": 3}, "logprobs", "logprobs is 3: give true or false"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs", "top_logprobs is 3: give logprobs: true"),
        (CHAT, {"logprobs": True, "top_logprobs": -2}, "top_logprobs", "top_logprobs is -2"),
        (CHAT, {"logit_bias": {"x": 1}}, "logit_bias", "logit_bias is "),
        (CHAT, {"messages": []}, "messages", "messages is []"),
        (CHAT, {"messages": None}, "messages", "messages is None"),
        (CHAT, {"messages": ["hi"]}, "messages", "messages[0] is 'hi'"),
        (CHAT, {"messages": [{"content": "hi"}]}, "messages", "messages[0] is "),
        (CHAT, {"messages": [HELLO[0], {"role": "user", "content": 3}]}, "messages", "messages[1].content is 3"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "'image_url'"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format", "response_format.type is 'xml'"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format", "has no schema"),
        (CHAT, {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format",
         "both given"),
        (CHAT, {"structured_outputs": {"regexp": "a"}}, "structured_outputs", "structured_outputs.regexp is 'a'"),
        (CHAT, {"structured_outputs": 3}, "structured_outputs", "structured_outputs is 3"),
        (CHAT, {"priority": "high"}, "priority", "priority is 'high'"),
        (CHAT, {"model": 3}, "model", "model is 3: give a string"),
        (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "has 'tools'"),
        (CHAT, {"prompt": "x"}, "prompt", "prompt is 'x': not supported"),
        (CHAT, {"detokenize": False}, "detokenize", "detokenize is False"),
        (CHAT, {"output_kind": 2}, "output_kind", "output_kind is 2"),
        (CHAT, {"add_special_tokens": True}, "add_special_tokens", "add_special_tokens is True"),
        (COMPLETIONS, {"prompt": None}, "prompt", "prompt is None"),
        (COMPLETIONS, {"prompt": []}, "prompt", "prompt is []"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt", "prompt is [1, 'a']"),
        (COMPLETIONS, {"suffix": "x"}, "suffix", "suffix is 'x'"),
        (COMPLETIONS, {"echo": True}, "echo", "echo is True"),
        (COMPLETIONS, {"logprobs": -3}, "logprobs", "logprobs is -3"),
        (COMPLETIONS, {"min_tokens": 20}, "min_tokens", "give at most max_tokens, which is 16"),
        (COMPLETIONS, {"max_completion_tokens": 3}, "max_completion_tokens", "not supported"),
        (COMPLETIONS, {"messages": HELLO}, "messages", "not supported"),
    ],
)  # fmt: skip
def test_refused_by_name(url: str, fields: dict[str, Any], param: str, message: str) -> None:
    body = {"model": "m", **({"messages": HELLO} if url == CHAT else {"prompt": "hello"}), **fields}
    with pytest.raises(ConfigError) as mistake:
        parse_call(url, body, OPEN)
    assert message in str(mistake.value)
    error = error_body(str(mistake.value), body)["error"]
    assert error == {"message": str(mistake.value), "type": "invalid_request_error", "param": param, "code": None}


@pytest.mark.parametrize(("url", "body"), [("/v1/embeddings", {}), (None, {}), (CHAT, None), (CHAT, [])])
def test_no_request_at_all(url: object, body: object) -> None:
    with pytest.raises(ConfigError) as mistake:
        parse_call(url, body, OPEN)
    assert error_body(str(mistake.value), body)["error"]["param"] is None


# --- responses


def _answers(call: Call, tokenizer: Tokenizer) -> list[RequestOutput]:
    """From a core with random logits, [V, V, V] by the last two tokens (`_logits`)."""
    core = StubCore(info(tokenizer.vocab_size), _logits(tokenizer))
    processor = Processor(tokenizer, core.info, seed=1)
    prompts = prompts_of(call, tokenizer)
    parsed = [processor.make(prompt, call.params, str(i)) for i, prompt in enumerate(prompts)]
    return run_to_completion(core, OutputProcessor(tokenizer), parsed)


def _logits(tokenizer: Tokenizer) -> np.ndarray:
    size = tokenizer.vocab_size
    return np.random.default_rng(0).normal(size=(size, 1, size)).repeat(size, axis=1)


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
    from openai.types.chat import ChatCompletion

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
        scores = log_softmax(_logits(tokenizer))
        known = [*outputs[0].prompt_token_ids, *completion.token_ids]
        for i, entry in enumerate(choice.logprobs.content):
            row = scores[known[prompt + i - 2], known[prompt + i - 1]]
            token = completion.token_ids[i]
            assert entry.token == tokenizer.decode([token], skip_special_tokens=False)
            assert entry.bytes == list(entry.token.encode())
            assert math.isclose(entry.logprob, row[token])
            best = np.argsort(-row)[:3]
            assert [t.token for t in entry.top_logprobs] == [tokenizer.decode([int(b)], False) for b in best]
            assert np.allclose([t.logprob for t in entry.top_logprobs], row[best])


def test_completion_response(tokenizer: Tokenizer) -> None:
    from openai.types import Completion

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
        assert math.isclose(found["logprob"], scores[ids[i - 2] if i > 1 else 0, ids[i - 1], ids[i]])
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


def test_failure_of_the_engine() -> None:
    def output(*reasons: str) -> RequestOutput:
        parts = [
            CompletionOutput(i, "", [], finish_reason=r, error="NaN" if r == "error" else None)
            for i, r in enumerate(reasons)
        ]
        return RequestOutput("1", None, [1], None, parts, True, RequestMetrics(0.0))

    assert failure([output("stop", "length"), output("stop")]) is None
    assert failure([output("stop"), output("stop", "error")]) == "NaN"
