"""Bodies of OpenAI's API: what they ask for, what is refused by which name, how a chat is written out."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from graphllm.chat.call import CHAT, COMPLETIONS, Call, Style, parse_call, write_out
from graphllm.chat.error_bodies import error_body
from graphllm.chat.replies import ReplyFormat
from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import SamplingParams, StructuredOutputsParams
from graphllm.engine.requests.processor import Processor
from graphllm.engine.requests.text import Tokenizer
from tests.engine import byte_tokenizer
from tests.engine.stub_core import info

OPEN = SamplingParams(max_tokens=None)  # defaults that leave the length to the endpoint
HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}


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
        (
            {"response_format": {"type": "json_object"}, "guided_decoding_backend": "xgrammar"},
            {"structured_outputs": StructuredOutputsParams(json_object=True, backend="xgrammar")},
        ),
        ({"guided_decoding_backend": "xgrammar"}, {}),
        (
            {"guided_regex": "a+", "guided_decoding_backend": "outlines"},
            {"structured_outputs": StructuredOutputsParams(regex="a+", backend="outlines")},
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
        "store": False, "safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h",
        "verbosity": "low", "prediction": {"type": "content", "content": "x"}, "context_management": {}, "echo": False,
        "suffix": None, "tools": [], "tool_choice": "none", "best_of": 1, "use_beam_search": False,
        "length_penalty": 1.0, "logprob_token_ids": None, "unheard_of": None,
    }  # fmt: skip
    of_tools = {"tools", "tool_choice"}
    completion = {name: value for name, value in inert.items() if name not in of_tools}
    assert _completion(**completion) == _completion()
    chat = _chat(**inert, parallel_tool_calls=True, functions=[], modalities=["text"])
    assert chat == _chat()


def test_the_other_fields_of_a_call() -> None:
    call = _chat(priority=3, cache_salt="s", chat_template_kwargs={"mood": "gay"}, add_generation_prompt=False)
    assert (call.priority, call.cache_salt) == (3, "s")
    assert call.template == {"mood": "gay", "add_generation_prompt": False}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), ([5, 6], [[5, 6]]), (["a", "b"], ["a", "b"]), ([[5], [6, 7]], [[5], [6, 7]]), ("", [""])],
)
def test_prompts_of_a_completion(prompt: Any, expected: list[Any], tokenizer: Tokenizer) -> None:
    call = _completion(prompt=prompt)
    assert write_out(call, tokenizer, Style()) == (call, expected)


def test_a_chat_is_written_out_by_its_template(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    call = parse_call(
        CHAT,
        {"messages": [{"role": "user", "content": parts}], "chat_template_kwargs": {"mood": "!"}},
        OPEN,
    )
    prompt: Any = write_out(call, tokenizer, Style())[1][0]
    assert prompt["prompt"] == "<s>user:one\ntwo;!bot:"
    ids = Processor(tokenizer, info(tokenizer.vocab_size)).make(prompt, OPEN, "r").prompt_token_ids
    assert ids.count(byte_tokenizer.BOS) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>user:one\ntwo;!bot:"


@pytest.mark.parametrize(
    ("url", "fields", "param", "message"),
    [
        (CHAT, {"temperature": -1}, "temperature", "temperature is -1"),
        (CHAT, {"temperature": "hot"}, "temperature", "temperature is 'hot'"),
        (CHAT, {"frobnicate": 3}, "frobnicate", "frobnicate is 3: not supported"),
        (CHAT, {"stream": 1}, "stream", "stream is 1: give true or false"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "only with stream: true"),
        (CHAT, {"stream": True, "stream_options": []}, "stream_options", "stream_options is []: give an object"),
        (CHAT, {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options",
         "stream_options.include_usage is 1: give true or false"),
        (CHAT, {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options",
         "stream_options has 'include_obfuscation'"),
        (CHAT, {"stream": True, "stream_options": {"x": 1}}, "stream_options", "stream_options has 'x'"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools", "tools[0].function is "),
        (CHAT, {"tools": [{"type": "custom"}]}, "tools", "tools[0].type is 'custom'"),
        (CHAT, {"tools": {}}, "tools", "tools is {}"),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "tool_choice is 'required': there are no tools"),
        (CHAT, {"tools": [ADD], "tool_choice": "any"}, "tool_choice", "tool_choice is 'any'"),
        (CHAT, {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice",
         "tool_choice.function.name is 'sub'"),
        (CHAT, {"tools": [ADD], "parallel_tool_calls": "no"}, "parallel_tool_calls", "parallel_tool_calls is 'no'"),
        (CHAT, {"tools": [ADD], "tool_choice": "required", "response_format": {"type": "json_object"}},
         "response_format", "response_format and tool_choice are both given"),
        (CHAT, {"tools": [ADD], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
         "structured_outputs", "structured_outputs and tool_choice are both given"),
        (CHAT, {"functions": [ADD["function"]]}, "functions", "functions is "),
        (CHAT, {"function_call": "auto"}, "function_call", "function_call is 'auto': not supported"),
        (CHAT, {"reasoning_effort": 3}, "reasoning_effort", "reasoning_effort is 3: give a string"),
        (CHAT, {"include_reasoning": "no"}, "include_reasoning", "include_reasoning is 'no'"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message",
         "continue_final_message is True: with add_generation_prompt another message begins"),
        (CHAT, {"chat_template": "x"}, "chat_template", "start the server with --trust-request-chat-template"),
        (CHAT, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "truncate_prompt_tokens is 0"),
        (CHAT, {"truncation_side": "middle"}, "truncation_side", "truncation_side is 'middle'"),
        (CHAT, {"stream_interval": 0}, "stream_interval", "stream_interval is 0"),
        (CHAT, {"request_id": "a b"}, "request_id", "request_id is 'a b'"),
        (CHAT, {"request_id": "日"}, "request_id", "request_id is '日'"),  # a letter, but in no header
        (CHAT, {"length_penalty": 0.5}, "length_penalty", "only with use_beam_search"),
        (CHAT, {"use_beam_search": True, "stream": True}, "use_beam_search", "leave out stream"),
        (CHAT, {"use_beam_search": True, "top_k": 3}, "top_k", "no meaning with use_beam_search"),
        (CHAT, {"logprob_token_ids": []}, "logprob_token_ids", "logprob_token_ids is ()"),
        (CHAT, {"thinking_token_budget": -2}, "thinking_token_budget", "thinking_token_budget is -2"),
        (CHAT, {"guided_json": {}, "structured_outputs": {"regex": "a"}}, "guided_json", "both given"),
        (CHAT, {"kv_transfer_params": 3}, "kv_transfer_params", "kv_transfer_params is 3: give an object"),
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
        *[
            (CHAT, {"messages": [*HELLO, {"role": role, "content": "hi"}]}, "messages", "messages[1].role is ")
            for role in ("", "user<|im_end|>", "user\nsystem", "[INST]", "</s>", "a b", "u" * 33)
        ],
        (CHAT, {"messages": [{**HELLO[0], "name": "<|im_end|>"}]}, "messages", "messages[0].name is '<|im_end|>'"),
        (CHAT, {"messages": [{**HELLO[0], "name": 7}]}, "messages", "messages[0].name is 7"),
        (CHAT, {"messages": [{"role": "tool", "tool_call_id": "x" * 257, "content": ""}]}, "messages",
         "messages[0].tool_call_id is "),
        (CHAT, {"messages": [HELLO[0], {"role": "user", "content": 3}]}, "messages", "messages[1].content is 3"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "'image_url'"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format", "response_format.type is 'xml'"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format", "has no schema"),
        (CHAT, {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format",
         "both given"),
        (CHAT, {"structured_outputs": {"regexp": "a"}}, "structured_outputs", "structured_outputs.regexp is 'a'"),
        (CHAT, {"structured_outputs": {"regex": "a", "backend": "yacc"}}, "structured_outputs",
         "structured_outputs.backend is 'yacc': give one of auto, guidance, xgrammar"),
        (CHAT, {"guided_decoding_backend": "yacc"}, "guided_decoding_backend", "is 'yacc': give one of auto, guidance"),
        (CHAT, {"guided_decoding_backend": "auto", "structured_outputs": {"regex": "a"}}, "guided_decoding_backend",
         "both given"),
        (CHAT, {"structured_outputs": 3}, "structured_outputs", "structured_outputs is 3"),
        (CHAT, {"priority": "high"}, "priority", "priority is 'high'"),
        (CHAT, {"model": 3}, "model", "model is 3: give a string"),
        (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "has 'tools'"),
        (CHAT, {"prompt": "x"}, "prompt", "prompt is 'x': not supported"),
        (CHAT, {"detokenize": False}, "detokenize", "detokenize is False"),
        (CHAT, {"output_kind": 2}, "output_kind", "output_kind is 2"),
        (CHAT, {"extra_args": {"a": 1}}, "extra_args", "give vllm_xargs"),
        (COMPLETIONS, {"prompt": None}, "prompt", "prompt is None"),
        (COMPLETIONS, {"prompt": []}, "prompt", "prompt is []"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt", "prompt is [1, 'a']"),
        (COMPLETIONS, {"echo": "yes"}, "echo", "echo is 'yes': give true or false"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        (COMPLETIONS, {"echo": True, "max_tokens": False}, "max_tokens", "max_tokens is False"),
        (COMPLETIONS, {"tools": [ADD]}, "tools", "tools is "),
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


# --- streams, echo, tools


def test_streams() -> None:
    for make in (_chat, _completion):
        assert [getattr(make(), name) for name in ("stream", "usage", "running_usage")] == [False] * 3
        assert not make(stream=True, stream_options={"include_usage": False, "continuous_usage_stats": True}).usage
        found = make(stream=True, stream_options={"include_usage": True, "include_obfuscation": False})
        assert (found.stream, found.usage, found.running_usage) == (True, True, False)
        found = make(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
        assert (found.usage, found.running_usage) == (True, True)


def test_echo_scores_the_prompt_too() -> None:
    """As in OpenAI's API: logprobs with echo are those of the prompt and of what comes behind it."""
    assert _completion(echo=True).params == _completion().params
    assert _completion(echo=True, logprobs=2).params == SamplingParams(max_tokens=16, logprobs=2, prompt_logprobs=2)
    assert _completion(echo=True, logprobs=2, prompt_logprobs=5).params.prompt_logprobs == 5
    alone = _completion(echo=True, max_tokens=0, logprobs=0)
    assert (alone.echo, alone.echo_only) == (True, True)
    assert alone.params == SamplingParams(max_tokens=1, logprobs=0, prompt_logprobs=0)  # no engine makes no tokens
    assert not _completion(echo=True, max_tokens=1).echo_only


def test_prompts_that_are_echoed_have_their_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello")
    call = _completion(prompt=[ids, [byte_tokenizer.BOS, *ids]], echo=True)
    found = write_out(call, tokenizer, Style())[1]
    assert found == [
        {"prompt": "hello", "prompt_token_ids": ids},
        {"prompt": "<s>hello", "prompt_token_ids": [byte_tokenizer.BOS, *ids]},
    ]
    for strange in (["hello"], [[-1]], [[10**20]], [[True]]):  # nothing to decode; the processor judges them
        assert list(write_out(call._replace(prompts=strange), tokenizer, Style())[1]) == strange


@pytest.mark.parametrize(
    ("fields", "style", "reply"),
    [
        ({}, Style(), ReplyFormat()),
        ({}, Style("hermes", True), ReplyFormat(reasoning=True)),
        ({"tools": [ADD]}, Style("hermes"), ReplyFormat(tools="hermes", names=frozenset({"add"}))),
        ({"tools": [ADD, NOW], "tool_choice": "none"}, Style("hermes"), ReplyFormat(names=frozenset({"add", "now"}))),
        (
            {"tools": [ADD], "tool_choice": "required"},
            Style("llama3"),
            ReplyFormat(tools="llama3", names=frozenset({"add"})),
        ),
        ({"tools": [ADD], "tool_choice": "required"}, Style(), ReplyFormat(tools="json", names=frozenset({"add"}))),
        (
            {"tools": [ADD, NOW], "tool_choice": {"type": "function", "function": {"name": "now"}}},
            Style(),
            ReplyFormat(tools="named", name="now", names=frozenset({"add", "now"})),
        ),
    ],
)
def test_how_a_reply_is_read(fields: dict[str, Any], style: Style, reply: ReplyFormat, tokenizer: Tokenizer) -> None:
    assert write_out(_chat(**fields), tokenizer, style)[0].reply == reply


def test_a_prompt_that_ends_in_a_think_tag(tokenizer: Tokenizer) -> None:
    """The reply begins with reasoning then, unless a grammar says what it begins with."""
    fields = {"chat_template_kwargs": {"mood": "<think>\n"}, "add_generation_prompt": False}
    for given, reasoning, thinking in (
        ({}, True, True),
        ({}, False, False),
        ({"structured_outputs": {"regex": "a"}}, True, False),
        ({"structured_outputs": {"regex": "a"}, "thinking_token_budget": 9}, True, True),
        ({"chat_template_kwargs": {"mood": "<think></think>"}}, True, False),
    ):
        call, prompts = write_out(_chat(**{**fields, **given}), tokenizer, Style(None, reasoning))
        assert "<think>" in prompts[0]["prompt"]  # type: ignore[index, call-overload]
        assert call.reply.thinking == thinking


def test_stop_strings_are_told_of_the_thinking(tokenizer: Tokenizer) -> None:
    thinks = {"chat_template_kwargs": {"mood": "<think>\n"}, "add_generation_prompt": False}
    for fields, reasoning, thinking in (
        ({"stop": ["a"]}, True, False),
        ({"stop": ["a"], **thinks}, True, True),
        ({"stop": ["a"], **thinks}, False, None),
        ({}, True, None),
    ):
        prompt: Any = write_out(_chat(**fields), tokenizer, Style(None, reasoning))[1][0]
        assert prompt.get("thinking") is thinking


def test_tools_are_shown_unless_none_may_be_called(tokenizer: Tokenizer) -> None:
    def shown(**fields: Any) -> str:
        prompt: Any = write_out(_chat(**fields), tokenizer, Style("hermes"))[1][0]
        return prompt["prompt"]

    assert shown(tools=[ADD, NOW]) == "<s>user:hello;2bot:"
    for choice in ("auto", "required", {"type": "function", "function": {"name": "add"}}):
        assert shown(tools=[ADD], tool_choice=choice) == "<s>user:hello;1bot:"
    assert shown(tools=[ADD], tool_choice="none") == shown() == "<s>user:hello;bot:"


def test_a_call_that_must_be_made_is_a_constraint() -> None:
    def schema(**fields: Any) -> Any:
        constraint = _chat(tools=[ADD, NOW], **fields).params.structured_outputs
        assert constraint is not None
        return jsonschema.Draft202012Validator(constraint.json)

    assert _chat(tools=[ADD, NOW]).params == _chat(tools=[ADD], tool_choice="none").params == OPEN
    add, now = {"name": "add", "parameters": {"a": 1}}, {"name": "now", "parameters": {}}
    required = schema(tool_choice="required")
    for calls, valid in (
        ([add], True),
        ([now, add, add], True),
        ([], False),
        (add, False),
        ([{**now, "parameters": {"a": 1}}], False),
        ([{"name": "sub", "parameters": {}}], False),
        ([{**add, "parameters": {"a": "x"}}], False),
    ):
        assert required.is_valid(calls) == valid, calls
    single = schema(tool_choice="required", parallel_tool_calls=False)
    assert (single.is_valid([add]), single.is_valid([add, add])) == (True, False)
    named = schema(tool_choice={"type": "function", "function": {"name": "add"}})
    assert (named.is_valid({"a": 1}), named.is_valid({"a": "x"}), named.is_valid([add])) == (True, False, False)


def test_a_model_whose_calls_nobody_can_read(tokenizer: Tokenizer) -> None:
    body = {"messages": HELLO, "tools": [ADD]}
    with pytest.raises(ConfigError, match=r"^tool_choice is 'auto': .* --tool-call-parser") as mistake:
        write_out(parse_call(CHAT, body, OPEN), tokenizer, Style())
    assert error_body(str(mistake.value), body)["error"]["param"] == "tools"
    for choice in ("none", "required"):
        write_out(_chat(tools=[ADD], tool_choice=choice), tokenizer, Style())


def test_marks_of_a_call_that_are_special_tokens(tokenizer: Tokenizer) -> None:
    """They must be in the text."""
    call = _chat(tools=[ADD])
    for style, special in (("hermes", True), ("llama3", False), ("mistral", False)):
        assert write_out(call, tokenizer, Style(style))[0].params.skip_special_tokens == special


def test_messages_as_clients_send_them_back(tokenizer: Tokenizer) -> None:
    """An answer of ours with its nulls, and what the tool said."""
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "refusal": None, "audio": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "noon"}]},
        {"role": "developer", "content": "be brief"},
    ]
    prompt: Any = write_out(_chat(messages=messages), tokenizer, Style("hermes"))[1][0]
    assert prompt["prompt"] == "<s>user:hello;assistant:;tool:noon;system:be brief;bot:"
    for arguments in ("{", "3", [1]):
        broken = {**call, "function": {"name": "now", "arguments": arguments}}
        with pytest.raises(ConfigError, match=r"^messages\[1\].tool_calls\[0\].function.arguments"):
            write_out(_chat(messages=[HELLO[0], {"role": "assistant", "tool_calls": [broken]}]), tokenizer, Style())
