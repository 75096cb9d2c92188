"""Anthropic's Messages API: requests as its client builds them, replies as its client reads them, what is refused."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types import Message, MessageParam, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from graphllm.chat.call import CHAT, parse_call
from graphllm.chat.error_bodies import anthropic_error_body
from graphllm.chat.replies import CallArguments, CallStart, Ending, Part, Reasoning, Text, Usage
from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.chat_template.conversation import text_of
from graphllm.server.apis.anthropic.events import MessageWriter
from graphllm.server.apis.anthropic.requests import (
    CountTokensRequest,
    MessagesRequest,
    count_to_chat,
    omits_thinking,
    to_chat,
)
from tests.server import reply_parts
from tests.tiers import draws

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "get_weather", "description": "Weather.", "input_schema": SCHEMA}
FUNCTION = {"name": "get_weather", "description": "Weather.", "parameters": SCHEMA}
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
UNKNOWN = Usage(0, 0)
SERVER = reply_parts.Replay()
CLIENT = anthropic.Anthropic(api_key="k", http_client=httpx2.Client(transport=SERVER), max_retries=0)


def _chat(**fields: Any) -> dict[str, Any]:
    body = {"model": "m", "max_tokens": 9, "messages": HELLO, **fields}
    MessagesRequest.model_validate(body)
    return to_chat(body)


# --- requests


def test_what_a_chat_says() -> None:
    chat = _chat(temperature=0.5, top_p=0.9, top_k=3, stream=True, stop_sequences=["a", "b"], metadata={"user_id": "u"})
    assert chat == {
        "model": "m", "max_tokens": 9, "messages": HELLO, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "stream": True,
        "stop": ["a", "b"],
    }  # fmt: skip
    call = parse_call(CHAT, chat, SamplingParams(max_tokens=None))
    assert call.params == SamplingParams(max_tokens=9, temperature=0.5, top_p=0.9, top_k=3, stop=("a", "b"))


def test_a_conversation() -> None:
    """Everything that a conversation with tools may hold, typed as the client types it."""
    messages: list[MessageParam] = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "b"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "one "},
                {"type": "text", "text": "line"},
                {"type": "tool_use", "id": "call_1", "name": "f", "input": {"ü": 1}},
                {"type": "tool_use", "id": "call_2", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "20"}]},
                {"type": "tool_result", "tool_use_id": "call_2", "content": "no such file", "is_error": True},
                {"type": "text", "text": "and?"},
            ],
        },
        {"role": "assistant", "content": []},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_3"}]},
        {"role": "system", "content": "be brief"},
    ]
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"ü": 1}'}},
        {"id": "call_2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    system = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    assert _chat(messages=messages, system=system)["messages"] == [
        {"role": "system", "content": system},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": messages[2]["content"][1:3], "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "20"},
        {"role": "tool", "tool_call_id": "call_2", "content": "Error: no such file"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "tool_call_id": "call_3", "content": ""},
        {"role": "system", "content": "be brief"},
    ]  # fmt: skip
    assert _chat(system="x")["messages"] == [{"role": "system", "content": "x"}, *HELLO]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"tool_choice": "required", "parallel_tool_calls": False}),
        (
            {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": False},
            {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        ),
        (None, {}),
    ],
)
def test_tools(choice: object, expected: dict[str, Any]) -> None:
    chat = _chat(
        tools=[{**TOOL, "type": "custom"}, {"name": "g", "input_schema": {}, "strict": True}], tool_choice=choice
    )
    functions = [FUNCTION, {"name": "g", "parameters": {}, "strict": True}]
    assert chat.pop("tools") == [{"type": "function", "function": f} for f in functions]
    assert chat == {"model": "m", "max_tokens": 9, "messages": HELLO, **expected}


def test_a_choice_without_tools_is_none() -> None:
    assert not {"tools", "tool_choice"} & _chat(tools=[], tool_choice={"type": "auto"}).keys()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}),
        ({"thinking": {"type": "adaptive", "display": "summarized"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "max"}),
        (
            {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True, "x": 1}},
            {"enable_thinking": True, "x": 1},
        ),
    ],
)
def test_what_the_template_is_told(given: dict[str, Any], told: dict[str, Any]) -> None:
    assert _chat(**given)["chat_template_kwargs"] == told
    assert "chat_template_kwargs" not in _chat()


def test_json() -> None:
    wanted = {"type": "json_schema", "schema": SCHEMA}
    for form in ({"output_config": {"format": wanted}}, {"output_format": wanted}):
        call = parse_call(CHAT, _chat(**form), SamplingParams())
        assert call.params.structured_outputs is not None
        assert call.params.structured_outputs.json == SCHEMA


def test_counting() -> None:
    """The same prompt as of the message."""
    body = {"model": "m", "messages": HELLO, "system": "x", "tools": [TOOL], "thinking": {"type": "disabled"}}
    CountTokensRequest.model_validate(body)
    assert {**count_to_chat(body), "max_tokens": 9} == _chat(**body)
    with pytest.raises(ConfigError, match=r"max_tokens is 5: not supported"):
        count_to_chat({**body, "max_tokens": 5})


def _user(*content: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}]}


def _assistant(*content: object) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": list(content)}]}


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}


@pytest.mark.parametrize(
    ("given", "start"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": "9"}, "max_tokens is '9'"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"container": "c"}, "container is 'c': not supported"),
        ({"n": 2}, "n is 2: not supported"),
        ({"speed": "fast"}, "speed is 'fast': not supported"),
        ({"stop_sequences": [""]}, "stop_sequences is ['']"),
        ({"messages": None}, "messages is None"),
        ({"messages": []}, "messages is []"),
        ({"messages": ["a"]}, "messages[0] is 'a'"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role is 'tool'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is None"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content is []"),
        ({"messages": [{**HELLO[0], "name": "n"}]}, "messages[0].name is 'n': not supported"),
        (_user({"type": "text", "text": "a"}, IMAGE), "messages[0].content[1].type is 'image': not supported"),
        (_user(DOCUMENT), "messages[0].content[0].type is 'document': not supported"),
        (_user({"type": "text"}), "messages[0].content[0].text is missing"),
        (_user({"type": "text", "text": "a", "x": 1}), "messages[0].content[0].x is 1: not supported"),
        (_user({"text": "a"}), "messages[0].content[0].type is missing"),
        (_user("a"), "messages[0].content[0] is 'a'"),
        (_user({"type": "tool_use", "id": "i", "name": "f", "input": {}}), "messages[0].content[0].type is 'tool_use'"),
        (_user({"type": "tool_result", "content": "a"}), "messages[0].content[0].tool_use_id is missing"),
        (
            _user({"type": "tool_result", "tool_use_id": "i", "content": [IMAGE]}),
            "messages[0].content[0].content[0].type is 'image': not supported",
        ),
        (
            _assistant({"type": "redacted_thinking", "data": "x"}),
            "messages[0].content[0].type is 'redacted_thinking': not supported",
        ),
        (
            _assistant({"type": "tool_use", "id": "i", "name": "f", "input": "{}"}),
            "messages[0].content[0].input is '{}'",
        ),
        ({"system": [IMAGE]}, "system[0].type is 'image': not supported"),
        ({"system": 3}, "system is 3"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type is 'web_search_20250305'"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading is True: not supported"),
        ({"tools": [{**TOOL, "input_examples": [{}]}]}, "tools[0].input_examples is [{}]: not supported"),
        ({"tools": [TOOL], "tool_choice": {"type": "x"}}, "tool_choice.type is 'x'"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice is {'type': 'tool'}"),
        ({"tools": [TOOL], "tool_choice": {"type": "any", "name": "f"}}, "tool_choice is {'type': 'any', 'name': 'f'}"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is {'type': 'any'}: there are no tools"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type is 'between_tools'"),
        ({"thinking": {"type": "adaptive", "display": "x"}}, "thinking.display is 'x'"),
        ({"output_config": {"effort": "much"}}, "output_config.effort is 'much'"),
        ({"output_config": {"x": 1}}, "output_config.x is 1: not supported"),
        ({"output_format": {"type": "text"}}, "output_format.type is 'text'"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is missing"),
        (
            {"output_config": {"format": {"type": "json_schema"}}, "output_format": {"type": "json_schema"}},
            "output_format and output_config.format are both given",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(given: dict[str, Any], start: str) -> None:
    with pytest.raises(ConfigError) as caught:
        to_chat({"model": "m", "max_tokens": 9, "messages": HELLO, **given})
    assert str(caught.value).startswith(start)
    assert len(str(caught.value)) < 300


RICH = {
    "max_tokens": 9, "system": [{"type": "text", "text": "a"}], "stop_sequences": ["a"], "tools": [TOOL],
    "tool_choice": {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1, "display": "omitted"}, "chat_template_kwargs": {"a": 1},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "a"},
                {"type": "tool_use", "id": "a", "name": "b", "input": {"c": 1}, "caller": {"type": "direct"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "a"}]}],
        },
    ],
}  # fmt: skip


@settings(deadline=None, max_examples=draws(16, 50))
@given(reply_parts.spoiled(RICH))
@example(RICH)
def test_mistakes_have_an_answer(body: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        assert to_chat(body)["messages"]


# --- replies


def _events(
    parts: list[Part], ending: Ending, first: Usage = UNKNOWN, size: int = 3, omit: bool = False
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events of a reply, and its message."""
    writer = MessageWriter("msg_1", "m", omit)
    events = writer.start(first)
    for batch in reply_parts.batches(parts, size):
        events += writer.parts(batch)
    events += writer.end(ending)
    return json.loads(json.dumps(events, allow_nan=False)), writer.body()


def _streamed(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that Anthropic's client makes of a stream."""
    SERVER.events = events
    asked: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": HELLO}
    with CLIENT.messages.stream(**asked) as stream:
        return stream.get_final_message().to_dict(exclude_none=True)


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """As the client's type has it."""
    return Message.model_validate(message, strict=True).to_dict(exclude_none=True)


@settings(deadline=None, max_examples=draws(16, 50))
@given(reply_parts.replies(), reply_parts.ENDINGS, reply_parts.USAGES, st.integers(1, 9))
def test_a_stream(parts: list[Part], ending: Ending, first: Usage, size: int) -> None:
    """Every event is one of the client's, and together they are the message; nothing of the reply is lost."""
    events, message = _events(parts, ending, first, size)
    for event in events:
        assert not reply_parts.unknown(EVENTS.validate_python(event, strict=True))
    assert _plain(_streamed(events)) == _plain(message)
    seen = []
    for block in message["content"]:
        if block["type"] == "tool_use":
            seen.append(("call", block["id"], block["name"], block["input"]))
        else:
            seen.append((block["type"].replace("thinking", "reasoning"), block[block["type"]]))
    wanted = reply_parts.blocks(parts)
    assert seen == [(*b[:3], json.loads(b[3])) if b[0] == "call" else b for b in wanted]
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == ending.usage.prompt
    assert usage["output_tokens"] == ending.usage.completion
    called = any(isinstance(part, CallStart) for part in parts)
    if ending.finish_reason == "length":
        assert message["stop_reason"] == "max_tokens"
    elif called:
        assert message["stop_reason"] == "tool_use"
    else:
        stopped = isinstance(ending.stop_reason, str)
        assert (message["stop_reason"], message["stop_sequence"]) == (
            ("stop_sequence", ending.stop_reason) if stopped else ("end_turn", None)
        )


@settings(deadline=None, max_examples=draws(16, 50))
@given(reply_parts.ARGUMENTS, st.integers(0, 60))
def test_arguments_that_break_off(arguments: str, length: int) -> None:
    """At max_tokens: the message has what the client makes of the stream."""
    parts = [CallStart(0, "call_0", "f"), CallArguments(0, arguments[:length])]
    events, message = _events(parts, Ending("length", Usage(1, 1)))
    assert _plain(_streamed(events)) == _plain(message)


@settings(deadline=None, max_examples=draws(16, 50))
@given(reply_parts.BROKEN)
def test_arguments_that_are_no_json(arguments: str) -> None:
    """There is a message in any case; it can be said again."""
    _, message = _events([CallStart(0, "call_0", "f"), CallArguments(0, arguments)], Ending("stop", Usage(1, 1)))
    assert not reply_parts.unknown(Message.model_validate(message, strict=True))
    _chat(messages=[*HELLO, {"role": "assistant", "content": message["content"]}, *HELLO])


@pytest.mark.parametrize("arguments", ["nothing", "[1]", '{"a": NaN}', '{"a": "\\ud800"}', "7"])
def test_what_is_no_object_is_passed_raw(arguments: str) -> None:
    _, message = _events([CallStart(0, "i", "f"), CallArguments(0, arguments)], Ending("stop", Usage(1, 1)))
    assert message["content"][0]["input"] == {"_raw": arguments}


def test_thinking_that_is_omitted() -> None:
    """There is a block, as Anthropic has it, with nothing in it."""
    assert omits_thinking({"thinking": {"type": "adaptive", "display": "omitted"}})
    assert not omits_thinking({"thinking": {"type": "adaptive"}})
    assert not omits_thinking({"thinking": None})
    events, message = _events([Reasoning("a"), Reasoning("b"), Text("c")], Ending("stop", Usage(1, 3)), omit=True)
    assert message["content"] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": "c"},
    ]
    assert _plain(_streamed(events)) == _plain(message)


@settings(deadline=None, max_examples=draws(16, 50))
@given(reply_parts.replies())
def test_a_reply_that_is_said_again(parts: list[Part]) -> None:
    """A client sends back what it got; the calls keep their ids."""
    _, message = _events(parts, Ending("stop", Usage(1, 1)))
    content = Message.model_validate(message).to_dict()["content"]
    again = _chat(messages=[*HELLO, {"role": "assistant", "content": content}, *HELLO])["messages"][1]
    seen = reply_parts.blocks(parts)
    assert text_of(again) == "".join(b[1] for b in seen if b[0] == "text")
    assert again.get("reasoning_content", "") == "".join(b[1] for b in seen if b[0] == "reasoning")
    calls = [
        (c["id"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in again.get("tool_calls", [])
    ]
    assert calls == [(*b[1:3], json.loads(b[3])) for b in seen if b[0] == "call"]


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_what_goes_wrong_in_a_stream(reason: str) -> None:
    """The client raises it."""
    events, _ = _events([Text("a")], Ending(reason, Usage(1, 1), error="out of cake" if reason == "error" else None))
    ErrorResponse.model_validate(events[-1], strict=True)
    with pytest.raises(
        anthropic.APIStatusError, match="out of cake" if reason == "error" else "stopped before its end"
    ):
        _streamed(events)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"),
        (404, "not_found_error"), (413, "request_too_large"), (422, "invalid_request_error"),
        (429, "rate_limit_error"), (500, "api_error"), (503, "overloaded_error"), (529, "overloaded_error"),
    ],
)  # fmt: skip
def test_errors(status: int, kind: str) -> None:
    body = anthropic_error_body(status, "no")
    assert body == {"type": "error", "error": {"type": kind, "message": "no"}}
    if status != 413:  # documented, and missing in the client's types
        ErrorResponse.model_validate(body, strict=True)


def test_types_are_strict() -> None:
    for wrong in (
        {"max_tokens": "9"},
        {"max_tokens": 0},
        {"temperature": "1"},
        {"messages": [{"role": "x", "content": ""}]},
    ):
        with pytest.raises(ValidationError):
            MessagesRequest.model_validate({"model": "m", "max_tokens": 9, "messages": HELLO, **wrong})
    assert MessagesRequest.model_json_schema()["additionalProperties"] is False
