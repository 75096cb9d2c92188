"""OpenAI's Responses API: requests as its client builds them, responses as its client reads them, what is refused, what
is kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseInputParam, ResponseStreamEvent
from pydantic import TypeAdapter, ValidationError

from graphllm.chat.call import CHAT, parse_call
from graphllm.chat.logprobs import TextLogprobs
from graphllm.chat.replies import CallArguments, CallStart, Ending, Part, Reasoning, ReplyFormat, Text, Usage
from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.requests.outputs import CompletionOutput, Logprob
from graphllm.server.apis.responses.events import ResponseWriter
from graphllm.server.apis.responses.requests import ResponsesRequest, conversation, to_chat
from graphllm.server.apis.responses.truncation import fitting
from graphllm.server.service.stored_responses import ResponseStore, StoredResponse
from tests.server import reply_parts
from tests.tiers import draws

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "name": "get_weather", "description": "Weather.", "parameters": SCHEMA}
FUNCTION = {"name": "get_weather", "description": "Weather.", "parameters": SCHEMA}
FORMAT = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SERVER = reply_parts.Replay()
CLIENT = openai.OpenAI(api_key="k", http_client=httpx2.Client(transport=SERVER), max_retries=0)


def _chat(earlier: list[dict[str, Any]] | None = None, **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "input": "hello", **fields}
    ResponsesRequest.model_validate(body)
    return to_chat(body, earlier or [])


# --- requests


def test_what_a_chat_says() -> None:
    same = {
        "stream": True, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 7, "stop": ["a"],
        "presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.5, "logit_bias": {"3": 1.0},
        "structured_outputs": {"regex": "a+"}, "priority": 2, "cache_salt": "s", "chat_template_kwargs": {"x": 1},
    }  # fmt: skip
    kept = {
        "store": True, "background": True, "previous_response_id": "resp_0", "metadata": {"a": "b"}, "user": "u",
        "safety_identifier": "s", "prompt_cache_key": "k", "service_tier": "default", "truncation": "disabled",
        "include": ["reasoning.encrypted_content"], "top_logprobs": 0, "stream_options": {"include_obfuscation": False},
    }  # fmt: skip
    chat = _chat(max_output_tokens=9, **same, **kept)
    assert chat == {"model": "m", "messages": HELLO, "max_tokens": 9, **same}
    call = parse_call(CHAT, chat, SamplingParams(max_tokens=None))
    assert (call.params.max_tokens, call.params.seed, call.params.logit_bias) == (9, 7, {3: 1.0})


def test_a_conversation() -> None:
    """Everything that a conversation may hold, typed as the client types it. What the model said is one message."""
    items: ResponseInputParam = [
        {"role": "developer", "content": "be brief"},
        {
            "type": "message", "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {"type": "reasoning", "id": "rs_0", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
            "content": [
                {"type": "output_text", "text": "one ", "annotations": []},
                {"type": "output_text", "text": "line", "annotations": [], "logprobs": []},
            ],
        },
        {
            "type": "function_call", "id": "fc_2", "call_id": "call_1", "name": "f", "arguments": '{"a":1}',
            "status": "completed",
        },
        {"type": "function_call", "call_id": "call_2", "name": "g", "arguments": ""},
        {"type": "function_call_output", "call_id": "call_1", "output": "20"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "30"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "in short"}]},
        {
            "type": "message", "id": "msg_2", "role": "assistant", "status": "completed",
            "content": [{"type": "refusal", "refusal": "no"}],
        },
        {"role": "user", "content": "and?"},
    ]  # fmt: skip
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
        {"id": "call_2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    said = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "line"}],
            "reasoning_content": "hm",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "20"},
        {"role": "tool", "tool_call_id": "call_2", "content": "30"},
        {"role": "assistant", "content": "no", "reasoning_content": "in short"},
        {"role": "user", "content": "and?"},
    ]
    assert _chat(input=items)["messages"] == [{"role": "system", "content": "be brief"}, *said]
    assert _chat(input=items, instructions="x")["messages"] == [
        {"role": "system", "content": "x"},
        {"role": "system", "content": "be brief"},
        *said,
    ]


def test_what_comes_before() -> None:
    """The instructions are those of this response, the rest is what was said."""
    earlier = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    assert _chat(earlier)["messages"] == earlier + HELLO
    assert _chat(earlier, instructions="x")["messages"] == [
        {"role": "system", "content": "x"},
        *earlier,
        *HELLO,
    ]
    assert conversation({"input": "hello", "instructions": "x"}, earlier) == earlier + HELLO


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, {}),
        ("auto", {"tool_choice": "auto"}),
        ("none", {"tool_choice": "none"}),
        ("required", {"tool_choice": "required"}),
        (
            {"type": "function", "name": "get_weather"},
            {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        ),
    ],
)
def test_tools(choice: object, expected: dict[str, Any]) -> None:
    bare = {"type": "function", "name": "g", "parameters": None, "strict": True}
    chat = _chat(tools=[TOOL, bare], tool_choice=choice, parallel_tool_calls=False)
    functions = [FUNCTION, {"name": "g", "strict": True}]
    assert chat.pop("tools") == [{"type": "function", "function": f} for f in functions]
    assert chat == {"model": "m", "messages": HELLO, "parallel_tool_calls": False, **expected}


def test_a_choice_without_tools_is_none() -> None:
    assert _chat(tools=[], tool_choice="auto", parallel_tool_calls=True) == {"model": "m", "messages": HELLO}


def test_the_form_of_the_text() -> None:
    for form, params in (
        ({"type": "text"}, None),
        ({"type": "json_object"}, (True, None)),
        (FORMAT, (None, SCHEMA)),
    ):
        call = parse_call(CHAT, _chat(text={"format": form, "verbosity": "medium"}), SamplingParams())
        found = call.params.structured_outputs
        assert (found and (found.json_object, found.json)) == params


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"reasoning": {"effort": "high", "summary": "auto"}}, {"reasoning_effort": "high"}),
        ({"reasoning": {"effort": "none"}}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning": {"effort": "low"}, "chat_template_kwargs": {"reasoning_effort": "x"}},
            {"reasoning_effort": "x"},
        ),
        ({"reasoning": {}}, None),
    ],
)
def test_what_the_template_is_told(fields: dict[str, Any], told: dict[str, Any] | None) -> None:
    assert _chat(**fields).get("chat_template_kwargs") == told


def _items(*items: object) -> dict[str, Any]:
    return {"input": list(items)}


IMAGE = {"type": "input_image", "image_url": "https://example.org/a.png", "detail": "auto"}
CALL = {"type": "function_call", "call_id": "i", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({"input": None}, "input is None"),
        ({"input": []}, "input is []"),
        ({"n": 2}, "n is 2: not supported"),
        ({"conversation": "c"}, "conversation is 'c': not supported"),
        ({"prompt": {"id": "p"}}, "prompt is {'id': 'p'}: not supported"),
        ({"truncation": "all"}, "truncation is 'all': give auto or disabled"),
        ({"top_logprobs": 2}, "top_logprobs is 2: give include: ['message.output_text.logprobs'] with it"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation is True"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0"),
        ({"max_output_tokens": "9"}, "max_output_tokens is '9'"),
        ({"background": 1}, "background is 1"),
        ({"background": True, "store": False}, "background is True"),
        ({"previous_response_id": 3}, "previous_response_id is 3"),
        ({"service_tier": "flex"}, "service_tier is 'flex'"),
        ({"metadata": {"a": 1}}, "metadata is {'a': 1}"),
        ({"instructions": ["a"]}, "instructions is ['a']"),
        (_items("a"), "input[0] is 'a'"),
        (_items({"id": "msg_1"}), "input[0].type is None"),
        (_items({"type": ["message"]}), "input[0].type is ['message']"),
        (_items({"type": "item_reference", "id": "msg_1"}), "input[0].type is 'item_reference': not supported"),
        (_items(*HELLO, {"type": "computer_call"}), "input[1].type is 'computer_call': not supported"),
        (_items({"role": "tool", "content": "a"}), "input[0].role is 'tool'"),
        (_items({"role": "user"}), "input[0].content is None"),
        (_items({**HELLO[0], "name": "n"}), "input[0].name is 'n': not supported"),
        (_items({"role": "user", "content": [{"type": "input_text", "text": "a"}, IMAGE]}),
         "input[0].content[1].type is 'input_image': not supported"),
        (_items({"role": "user", "content": [{"type": "input_text"}]}), "input[0].content[0].text is missing"),
        (_items({**CALL, "arguments": "{"}), "input[0].arguments is '{'"),
        (_items({**CALL, "arguments": "[]"}), "input[0].arguments is '[]'"),
        (_items({**CALL, "arguments": '{"a": "\\ud83d"}'}), "input[0].arguments is '{\"a\": "),
        (_items({**CALL, "call_id": None}), "input[0].call_id is missing"),
        (_items({"type": "function_call_output", "call_id": "i"}), "input[0].output is None"),
        (_items({"type": "function_call_output", "call_id": "i", "output": [IMAGE]}), "input[0].output[0].type is"),
        (_items({"type": "reasoning", "summary": [], "encrypted_content": "x"}), "input[0].encrypted_content is 'x'"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type is 'web_search': not supported"),
        ({"tools": [{"type": "function"}]}, "tools[0].name is missing"),
        ({"tools": [{**TOOL, "parameters": "x"}]}, "tools[0].parameters is 'x'"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading is True: not supported"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice is 'any'"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type is 'allowed_tools'"),
        ({"tool_choice": "required"}, "tool_choice is 'required': there are no tools"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type is 'grammar'"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema is missing"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name is missing"),
        ({"text": {"verbosity": "none"}}, "text.verbosity is 'none'"),
        ({"text": {"format": FORMAT}, "structured_outputs": {"regex": "a"}}, "text.format and structured_outputs"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort is 'much'"),
        ({"reasoning": {"summary": "x"}}, "reasoning.summary is 'x'"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode is 'pro': not supported"),
    ],
)  # fmt: skip
def test_what_is_refused(fields: dict[str, Any], start: str) -> None:
    with pytest.raises(ConfigError) as caught:
        to_chat({"model": "m", "input": "hello", **fields})
    assert str(caught.value).startswith(start)
    assert len(str(caught.value)) < 300


def test_types_are_strict() -> None:
    for wrong in ({"max_output_tokens": "9"}, {"top_logprobs": "1"}, {"temperature": "1"}, {"metadata": {"a": 1}}):
        with pytest.raises(ValidationError):
            ResponsesRequest.model_validate({"input": "hello", **wrong})
    assert ResponsesRequest.model_json_schema()["additionalProperties"] is False


RICH = {
    "instructions": "a", "max_output_tokens": 9, "tools": [TOOL], "tool_choice": {"type": "function", "name": "a"},
    "reasoning": {"effort": "low", "summary": "auto"}, "text": {"format": FORMAT}, "metadata": {"a": "b"},
    "include": ["a"], "stream_options": {"include_obfuscation": False}, "chat_template_kwargs": {"a": 1},
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [{"text": "a"}], "content": [{"text": "a"}]},
        {"type": "function_call", "call_id": "i", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "i", "output": [{"type": "input_text", "text": "a"}]},
    ],
}  # fmt: skip


@settings(deadline=None, max_examples=draws(16, 50))
@given(reply_parts.spoiled(RICH))
@example(RICH)
def test_mistakes_have_an_answer(body: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        assert to_chat(body)["messages"]


# --- responses


def _writer(**request: Any) -> ResponseWriter:
    return ResponseWriter("resp_1", 1700000000, "m", {"input": "hello", **request}, SamplingParams(temperature=0.25))


def _events(
    parts: list[Part], ending: Ending, size: int = 3, **request: Any
) -> tuple[list[dict[str, Any]], ResponseWriter]:
    """The events of a reply, and their writer."""
    writer = _writer(**request)
    events = writer.start()
    for batch in reply_parts.batches(parts, size):
        events += writer.parts(batch)
    events += writer.end(ending)
    return json.loads(json.dumps(events, allow_nan=False)), writer


def _streamed(events: list[dict[str, Any]]) -> tuple[list[Any], list[tuple[str, ...]]]:
    """What OpenAI's client makes of a stream: its events, and what the deltas came to."""
    SERVER.events = events
    heard = []
    seen: dict[int, tuple[str, ...]] = {}
    with CLIENT.responses.stream(model="m", input="hello") as stream:
        for event in stream:
            heard.append(event)
            if event.type == "response.output_text.delta":
                seen[event.output_index] = ("text", event.snapshot)
            elif event.type == "response.reasoning_text.delta":
                before = seen.get(event.output_index, ("reasoning", ""))[1]
                seen[event.output_index] = ("reasoning", before + event.delta)
            elif event.type == "response.output_item.added" and event.item.type == "function_call":
                seen[event.output_index] = ("call", event.item.call_id, event.item.name, "")
            elif event.type == "response.function_call_arguments.delta":
                seen[event.output_index] = (*seen[event.output_index][:3], event.snapshot)
    return heard, [seen[index] for index in sorted(seen)]


def _items_of(body: dict[str, Any]) -> list[tuple[str, ...]]:
    found = []
    for item in body["output"]:
        if item["type"] == "function_call":
            found.append(("call", item["call_id"], item["name"], item["arguments"]))
        else:
            (part,) = item["content"]
            found.append(("text" if item["type"] == "message" else "reasoning", part["text"]))
    return found


@settings(deadline=None, max_examples=draws(16, 50))
@given(reply_parts.replies(reply_parts.BROKEN), reply_parts.ENDINGS, st.integers(1, 9))
def test_a_stream(parts: list[Part], ending: Ending, size: int) -> None:
    """Every event is one of the client's, and together they are the response; nothing of the reply is lost."""
    events, writer = _events(parts, ending, size)
    body = writer.body()
    for event in events:
        # Older clients have a name there.
        named = event["type"] == "response.function_call_arguments.done"
        assert reply_parts.unknown(EVENTS.validate_python(event, strict=True)) == (
            {"name": event["name"]} if named else {}
        )
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    heard, seen = _streamed(events)
    assert heard[0].type == "response.created"
    assert heard[0].response.to_dict() == {
        **body,
        "status": "in_progress",
        "output": [],
        "usage": None,
        "incomplete_details": None,
    }
    assert seen == _items_of(body) == reply_parts.blocks(parts)
    last = Response.model_validate(body, strict=True)
    assert not reply_parts.unknown(last)
    complete = ending.finish_reason == "stop"
    assert heard[-1].type == ("response.completed" if complete else "response.incomplete")
    assert (last.output_text, last.usage) == (heard[-1].response.output_text, heard[-1].response.usage)
    assert last.status == ("completed" if complete else "incomplete")
    assert last.incomplete_details is None or last.incomplete_details.reason == "max_output_tokens"
    statuses = [item["status"] for item in body["output"]]
    assert statuses[:-1] == ["completed"] * len(statuses[:-1])
    assert statuses[-1:] in ([], [last.status])
    assert last.usage is not None
    used = ending.usage
    assert (last.usage.input_tokens, last.usage.input_tokens_details.cached_tokens) == (used.prompt, used.cached)
    assert (last.usage.output_tokens, last.usage.output_tokens_details.reasoning_tokens) == (
        used.completion, used.reasoning,
    )  # fmt: skip


@settings(deadline=None, max_examples=draws(16, 50))
@given(reply_parts.replies(reply_parts.BROKEN), st.integers(1, 9))
def test_items_begin_and_end(parts: list[Part], size: int) -> None:
    """What is said of an item lies between its beginning and its end, and at its end it is what the response has."""
    events, writer = _events(parts, Ending("stop", Usage(1, 1)), size)
    output = writer.body()["output"]
    inner = events[2:-1]
    for index, item in enumerate(output):
        about = [e for e in inner if e["output_index"] == index]
        assert inner[: len(about)] == about
        del inner[: len(about)]
        kinds = [e["type"].removeprefix("response.") for e in about]
        assert kinds[0] == "output_item.added"
        assert kinds[-1] == "output_item.done"
        assert about[-1]["item"] == item
        assert all(e.get("item_id", item["id"]) == item["id"] for e in about)
        assert all(e.get("content_index", 0) == 0 for e in about)
        if item["type"] != "function_call":
            assert (kinds[1], kinds[-2]) == ("content_part.added", "content_part.done")
            assert about[-2]["part"] == item["content"][0]
    assert not inner
    assert len({item["id"] for item in output}) == len(output)


@settings(deadline=None, max_examples=draws(16, 50))
@given(reply_parts.replies())
def test_a_reply_that_is_gone_on_from(parts: list[Part]) -> None:
    """With previous_response_id, and by a client that sends back the output it got, the chat is the same."""
    _, writer = _events(parts, Ending("stop", Usage(1, 1)))
    output = [item.to_dict() for item in Response.model_validate(writer.body()).output]
    stored = _chat([*conversation({"input": "hello"}), *writer.conversation()], input="and?")
    assert stored == _chat(input=[*HELLO, *output, {"role": "user", "content": "and?"}])
    seen = reply_parts.blocks(parts)
    said = stored["messages"][1:-1]
    assert len(said) == bool(seen)
    for message in said:
        assert message["content"] == "\n".join(b[1] for b in seen if b[0] == "text")
        assert message.get("reasoning_content", "") == "\n".join(b[1] for b in seen if b[0] == "reasoning")
        calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
        assert calls == [b[1:] for b in seen if b[0] == "call"]


def test_a_call_that_broke_off_is_not_gone_on_from() -> None:
    parts = [Text("a"), CallStart(0, "call_0", "f"), CallArguments(0, '{"a": ')]
    _, writer = _events(parts, Ending("length", Usage(1, 1)))
    assert writer.body()["output"][1]["arguments"] == '{"a": '
    assert writer.conversation() == [{"role": "assistant", "content": "a"}]


def test_what_a_response_says_about_its_request() -> None:
    request: dict[str, Any] = {
        "instructions": "x", "max_output_tokens": 9, "metadata": {"a": "b"}, "parallel_tool_calls": False, "user": "u",
        "previous_response_id": "resp_0", "prompt_cache_key": "k", "reasoning": {"effort": "low", "summary": None},
        "safety_identifier": "s", "service_tier": "auto", "text": {"format": FORMAT}, "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "get_weather"}, "background": True, "temperature": None,
    }  # fmt: skip
    to_chat({"input": "hello", **request})
    response = Response.model_validate(_writer(**request).body(), strict=True)
    told = response.to_dict()
    assert told["tools"] == [{**TOOL, "strict": None}]
    same = request.keys() - {"tools", "temperature"}
    assert {name: told[name] for name in same} == {name: request[name] for name in same}
    assert (response.temperature, response.top_p, response.status) == (0.25, 1.0, "queued")
    plain = Response.model_validate(_writer().body(), strict=True)
    assert not reply_parts.unknown(plain)
    assert (plain.tool_choice, plain.tools, plain.metadata, plain.background) == ("auto", [], {}, False)
    assert plain.text is not None
    assert plain.text.format is not None
    assert plain.text.format.type == "text"


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_what_goes_wrong(reason: str) -> None:
    events, writer = _events([Reasoning("a")], Ending(reason, Usage(1, 1), error="no" if reason == "error" else None))
    heard, _ = _streamed(events)
    response = Response.model_validate(writer.body(), strict=True)
    assert heard[-1].type == "response.failed"
    assert response.error is not None
    assert (response.status, response.error.code) == ("failed", "server_error")
    assert response.error.message == ("no" if reason == "error" else "the request was stopped before its end")
    assert [item["status"] for item in writer.body()["output"]] == ["incomplete"]


def test_a_response_that_is_cancelled() -> None:
    writer = _writer(background=True)
    writer.start()
    writer.parts([Text("a"), Text("b")])
    running = Response.model_validate(writer.body(), strict=True)
    assert (running.status, running.output_text) == ("in_progress", "ab")
    writer.cancelled()
    response = Response.model_validate(writer.body(), strict=True)
    assert (response.status, response.output_text) == ("cancelled", "ab")
    assert [item["status"] for item in writer.body()["output"]] == ["incomplete"]


# --- what is kept


def _record(size: int = 0, running: bool = False) -> StoredResponse:
    return StoredResponse({"id": "x" * size}, [], running=running)


SIZE = len(json.dumps([{"id": ""}, []], separators=(",", ":")))


def test_the_oldest_leave_first() -> None:
    store = ResponseStore(count=2)
    for name in "abc":
        store.put(name, _record())
    assert [store.get(name) is not None for name in "abc"] == [False, True, True]
    store.put("b", _record(1))  # it is the newest now
    store.put("d", _record())
    assert [store.get(name) is not None for name in "bcd"] == [True, False, True]
    assert store.remove("b") == _record(1)
    assert store.remove("b") is None
    assert (len(store), store.bytes) == (1, SIZE)


def test_bytes_are_counted() -> None:
    store = ResponseStore(bytes=3 * SIZE + 10)
    for name in "abc":
        store.put(name, _record())
    assert (len(store), store.bytes) == (3, 3 * SIZE)
    store.put("d", _record(11))
    assert [store.get(name) is not None for name in "abcd"] == [False, False, True, True]
    store.put("e", _record(1000))  # more than there is room for, alone
    assert (len(store), store.bytes) == (0, 0)


@settings(deadline=None, max_examples=draws(16, 50))
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 60), st.booleans())))
def test_the_store_keeps_its_limits(puts: list[tuple[str, int, bool]]) -> None:
    store = ResponseStore(count=3, bytes=120)
    kept: dict[str, StoredResponse] = {}
    for name, size, remove in puts:
        if remove:
            before = store.get(name)
            assert store.remove(name) is before
            assert store.get(name) is None
        else:
            kept[name] = _record(size)
            store.put(name, kept[name])
        found = {n: r for n in "abcdef" if (r := store.get(n)) is not None}
        assert len(store) == len(found) <= 3
        assert store.bytes == sum(SIZE + len(r.body["id"]) for r in found.values()) <= 120
        assert all(found[n] is kept[n] for n in found)


def test_what_runs_stays() -> None:
    """Until its end is put; then it is as new as that."""
    store = ResponseStore(count=1)
    store.put("a", _record(running=True))
    store.put("b", _record())
    store.put("c", _record())
    assert [store.get(name) is not None for name in "abc"] == [True, False, False]
    store.put("a", _record())
    store.put("d", _record())
    assert [store.get(name) is not None for name in "ad"] == [False, True]
    assert (len(store), store.bytes) == (1, SIZE)


# --- truncation


def test_the_oldest_turns_are_left_out() -> None:
    """Whole turns, so that no output of a tool stands without its call."""

    def said(messages: Any) -> str:
        return "".join(m["content"] for m in messages)

    async def cut(text: str, room: int, wanted: int = 1) -> str:
        roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
        messages = [{"role": roles[kind], "content": f"{kind}{i}"} for i, kind in enumerate(text)]

        async def fits(chosen: Any, free: int) -> bool:
            return len(chosen) + free <= room

        return said(await fitting(messages, wanted, fits))

    for text, room, wanted, expected in (
        ("suatauaua", 99, 1, "s0u1a2t3a4u5a6u7a8"),
        ("suatauaua", 9, 1, "s0u5a6u7a8"),
        ("suatauau", 8, 3, "s0u5a6u7"),
        ("suatauau", 5, 2, "s0u7"),
        ("suu", 3, 9, "s0u2"),  # no start leaves so much
        ("suu", 1, 1, "s0u2"),  # nothing fits: the last turn is refused
        ("sauau", 5, 1, "s0u2a3u4"),  # what begins with the model
        ("aua", 3, 1, "u1a2"),
    ):
        assert asyncio.run(cut(text, room, wanted)) == expected, text


# --- log-probabilities


def _completion(tokens: list[str], finish: str | None = None) -> CompletionOutput:
    positions = [{i: Logprob(-0.5, 1, token)} for i, token in enumerate(tokens)]
    return CompletionOutput(0, "".join(tokens), [0] * len(tokens), logprobs=positions, finish_reason=finish)


@pytest.mark.parametrize(
    ("tokens", "reply", "expected"),
    [
        (["a", " b", "</s>"], ReplyFormat(), "a b"),
        (["<th", "ink>", "a", "</think>", "\n", "b", "</s>"], ReplyFormat(reasoning=True), "b"),
        (["\n", "<think>a</", "think>", "\n\n", "b", " ", "c", "</s>"], ReplyFormat(reasoning=True), "b c"),
        (["a</think>", "b", "</s>"], ReplyFormat(reasoning=True, thinking=True), "b"),
        (["<th", "e b", "</s>"], ReplyFormat(reasoning=True), "<the b"),
        (["<think>", "a", "</s>"], ReplyFormat(reasoning=True), ""),
        (["<think>a</think>", "b", "</s>"], ReplyFormat(), "<think>a</think>b"),
    ],
)
def test_the_text_alone_has_log_probabilities(tokens: list[str], reply: ReplyFormat, expected: str) -> None:
    """Whether they come one by one or all at once."""
    call = parse_call(CHAT, _chat(include=["message.output_text.logprobs"]), SamplingParams(max_tokens=None))
    call = call._replace(reply=reply)
    whole = TextLogprobs(call).take(_completion(tokens, "stop"))
    each = TextLogprobs(call)
    one_by_one = [e for i, t in enumerate(tokens) for e in each.take(_completion([t], "stop" if t == "</s>" else None))]
    assert "".join(entry["token"] for entry in whole) == expected
    assert one_by_one == whole


def test_text_before_a_call_has_its_log_probabilities() -> None:
    writer = _writer()
    entries = [{"token": t, "logprob": -1.0, "bytes": [], "top_logprobs": []} for t in ("Wait", " now", "<call>", "{}")]
    writer.start()
    writer.parts([Text("Wait now"), CallStart(0, "call_0", "f"), CallArguments(0, "{}")], entries)
    writer.end(Ending("tool_calls", Usage(1, 1)))
    message, call = writer.body()["output"]
    assert [e["token"] for e in message["content"][0]["logprobs"]] == ["Wait", " now"]
    assert call["arguments"] == "{}"
