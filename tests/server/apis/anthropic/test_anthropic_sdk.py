"""Anthropic's own client against a live server: messages, streams, tools and their results, thinking, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import jsonschema
import pytest
from anthropic import Anthropic, AsyncAnthropic
from anthropic.types import Message
from pydantic import BaseModel

from tests.server import sdk
from tests.server.live import Served
from tests.server.reply_parts import unknown
from tests.waiting import PATIENCE

SAID = "12 + 7 = 19."
TOOLS: Any = [
    {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in sdk.FUNCTIONS
]
OPENAI_TOOLS: Any = [{"type": "function", "function": function} for function in sdk.FUNCTIONS]


@pytest.fixture
def client(served: Served) -> Iterator[Anthropic]:
    with Anthropic(base_url=served.url, api_key="any", max_retries=0, timeout=PATIENCE) as client:
        yield client


def _body(messages: Any = sdk.SUM, **fields: Any) -> dict[str, Any]:
    """The model's own default is greedy."""
    return {"model": sdk.MODEL, "max_tokens": 200, "messages": messages, **fields}


def _input_tokens(message: Any) -> int:
    """All of the prompt's: those of the cache are counted by themselves."""
    return message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_a_message(client: Anthropic) -> None:
    raw = client.messages.with_raw_response.create(**_body(), **sdk.fresh())
    read = Message.model_validate(json.loads(raw.text()), strict=True)
    assert unknown(read) == {}
    (block,) = read.content
    assert (block.type, block.text, read.role, read.type, read.model) == (
        "text",
        SAID,
        "assistant",
        "message",
        sdk.MODEL,
    )  # type: ignore[union-attr]
    assert (read.stop_reason, read.stop_sequence) == ("end_turn", None)
    assert (read.usage.input_tokens, read.usage.cache_read_input_tokens) == (len(sdk.prompt_ids(sdk.SUM)), 0)
    assert read.usage.output_tokens == len(sdk.tokenizer().encode(SAID)) + 1


def test_what_is_said_to_the_model(client: Anthropic) -> None:
    """System and messages, text or blocks, come to it as transformers would write them out; and are counted so."""
    blocks: Any = [
        {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "brief."},
    ]
    turns: Any = [
        *sdk.SUM,
        {"role": "assistant", "content": SAID},
        {"role": "user", "content": [{"type": "text", "text": "Thanks"}]},
    ]
    plain = [*turns[:2], {"role": "user", "content": "Thanks"}]
    for fields, chat, tools in (
        ({"messages": sdk.SUM}, sdk.SUM, {}),
        ({"messages": turns}, plain, {}),
        ({"messages": sdk.SUM, "system": "Be brief."}, [{"role": "system", "content": "Be brief."}, *sdk.SUM], {}),
        ({"messages": sdk.SUM, "system": blocks}, [{"role": "system", "content": "Be\nbrief."}, *sdk.SUM], {}),
        ({"messages": sdk.WEATHER, "tools": TOOLS}, sdk.WEATHER, {"tools": OPENAI_TOOLS}),
    ):
        expected = len(sdk.prompt_ids(chat, **tools))
        assert client.messages.count_tokens(model=sdk.MODEL, **fields).input_tokens == expected
        assert _input_tokens(client.messages.create(**_body(**fields))) == expected


def test_how_a_message_ends(client: Anthropic) -> None:
    def ask(**fields: Any) -> tuple[str, str | None, str | None]:
        whole = client.messages.create(**_body(**fields))
        with client.messages.stream(**_body(**fields)) as stream:
            streamed = stream.get_final_message()
        (text,) = {"".join(b.text for b in message.content) for message in (whole, streamed)}  # type: ignore[union-attr]
        assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
        assert streamed.usage.output_tokens == whole.usage.output_tokens
        return text, whole.stop_reason, whole.stop_sequence

    assert ask() == (SAID, "end_turn", None)
    assert ask(max_tokens=3) == (sdk.tokenizer().decode(sdk.tokenizer().encode(SAID)[:3]), "max_tokens", None)
    assert ask(stop_sequences=["xyz", " ="]) == ("12 + 7", "stop_sequence", " =")


def test_a_stream(client: Anthropic) -> None:
    whole = client.messages.create(**_body(sdk.STORY), **sdk.fresh())
    with client.messages.stream(**_body(sdk.STORY), **sdk.fresh()) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == whole.content[0].text  # type: ignore[union-attr]
    assert len(texts) > 10
    assert [b.text for b in final.content] == ["".join(texts)]  # type: ignore[union-attr]
    assert (final.stop_reason, final.model, final.usage) == (whole.stop_reason, whole.model, whole.usage)
    events = list(client.messages.create(**_body(sdk.STORY), stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    start = events[0]
    assert start.type == "message_start"
    assert (start.message.content, _input_tokens(start.message)) == ([], len(sdk.prompt_ids(sdk.STORY)))


@pytest.mark.parametrize(
    "choice", [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "get_weather"}], ids=lambda c: c["type"]
)
def test_a_tool_is_used(choice: Any, client: Anthropic) -> None:
    body = _body(sdk.WEATHER, tools=TOOLS, tool_choice={**choice, "disable_parallel_tool_use": True})
    whole = client.messages.create(**body)
    with client.messages.stream(**body) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        (use,) = message.content
        assert use.type == "tool_use"
        assert (use.name, message.stop_reason) == ("get_weather", "tool_use")
        jsonschema.validate(use.input, sdk.CITY)
    assert json.loads("".join(pieces)) == streamed.content[0].input  # type: ignore[union-attr]
    assert whole.content[0].input == streamed.content[0].input  # type: ignore[union-attr]


def test_no_tool_is_used(client: Anthropic) -> None:
    message = client.messages.create(**_body(sdk.WEATHER, tools=TOOLS, tool_choice={"type": "none"}))
    assert ([b.type for b in message.content], message.stop_reason) == (["text"], "end_turn")
    assert _input_tokens(message) == len(sdk.prompt_ids(sdk.WEATHER))


def test_two_tools_at_once(client: Anthropic) -> None:
    with client.messages.stream(**_body(sdk.BOTH, tools=TOOLS)) as stream:
        streamed = stream.get_final_message()
    for message in (client.messages.create(**_body(sdk.BOTH, tools=TOOLS)), streamed):
        assert [b.input for b in message.content if b.type == "tool_use"] == [{"city": "Paris"}, {"city": "Rome"}]
        assert len({b.id for b in message.content if b.type == "tool_use"}) == 2


def test_a_tool_and_its_result(client: Anthropic) -> None:
    first = client.messages.create(**_body(sdk.WEATHER, tools=TOOLS))
    (use,) = first.content
    assert use.type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": sdk.RESULT}]}
    messages = [*sdk.WEATHER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(**_body(messages, tools=TOOLS))
    assert [b.text for b in second.content] == [sdk.TOLD]  # type: ignore[union-attr]
    function = {"name": "get_weather", "arguments": {"city": "Paris"}}
    plain = [*sdk.WEATHER, {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}]
    plain.append({"role": "tool", "content": sdk.RESULT})
    assert _input_tokens(second) == len(sdk.prompt_ids(plain, tools=OPENAI_TOOLS))
    count = client.messages.count_tokens(model=sdk.MODEL, messages=messages, tools=TOOLS)
    assert count.input_tokens == _input_tokens(second)


class Answer(BaseModel):
    """What the model is to answer with."""

    first: int
    second: int


def test_a_parsed_answer(client: Anthropic) -> None:
    parsed = client.messages.parse(**_body(), output_format=Answer).parsed_output
    assert isinstance(parsed, Answer)


def test_a_prompt_that_is_cached(client: Anthropic) -> None:
    question = [{"role": "user", "content": "Sort these words: pear banana apple cherry fig kiwi lemon mango"}]
    body = {**_body(question), **sdk.fresh()}
    first, second = (client.messages.create(**body) for _ in range(2))
    assert (first.usage.cache_read_input_tokens, second.content) == (0, first.content)
    assert second.usage.cache_read_input_tokens
    assert _input_tokens(first) == _input_tokens(second) == len(sdk.prompt_ids(question))


# --- errors, ids, deadlines


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"extra_body": {"temperature": -1}}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x " * 3000}]}, "3009 tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"extra_body": {"frobnicate": 1}}, "frobnicate"),
    ],
)
def test_bad_requests(fields: Any, told: str, client: Anthropic) -> None:
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError) as bad:
            client.messages.create(**_body(stream=stream, **{"messages": sdk.SUM, **fields}))
        body: Any = bad.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert told in body["error"]["message"]


def test_a_model_that_is_not_served(client: Anthropic) -> None:
    for use in (
        lambda: client.messages.create(**_body() | {"model": "claude"}),
        lambda: client.messages.count_tokens(model="claude", messages=sdk.SUM),
    ):
        with pytest.raises(anthropic.NotFoundError) as missing:
            use()
        body: Any = missing.value.body
        assert body["error"]["type"] == "not_found_error"


def test_deadlines(client: Anthropic, served: Served) -> None:
    """A client that gives up, and one that has heard enough, free what they held."""
    places = {"type": "array", "items": {"type": "string"}, "minItems": 900}  # more than it has tokens for
    tool = {**TOOLS[0], "input_schema": {"type": "object", "properties": {"city": places}, "required": ["city"]}}
    calls = _body(sdk.WEATHER, tools=[tool], tool_choice={"type": "any"}, max_tokens=900)
    with pytest.raises(anthropic.APITimeoutError):
        client.with_options(timeout=0.1).messages.create(**calls)
    with client.messages.stream(**calls) as stream:
        next(iter(stream))
    served.idle()


def test_many_at_once(served: Served) -> None:
    """The asynchronous client."""

    async def ask(client: AsyncAnthropic, a: int) -> tuple[str, str]:
        body = _body([{"role": "user", "content": f"What is {a} + 7?"}])
        whole = await client.messages.create(**body)
        async with client.messages.stream(**body) as stream:
            text = "".join([text async for text in stream.text_stream])
        return text, whole.content[0].text  # type: ignore[union-attr]

    async def main() -> list[tuple[str, str]]:
        async with AsyncAnthropic(base_url=served.url, api_key="any", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, a) for a in range(11, 17)))

    for a, texts in zip(range(11, 17), asyncio.run(main()), strict=True):
        assert texts == (f"{a} + 7 = {a + 7}.",) * 2


def test_keys(serve: Callable[..., Served]) -> None:
    server = serve("--api-key", "sesame").wait_ready()
    with Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            client.messages.create(**_body())
        body: Any = refused.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")
    for key in ({"api_key": "sesame"}, {"auth_token": "sesame"}):
        with Anthropic(base_url=server.url, max_retries=0, **key) as client:  # type: ignore[arg-type]
            assert client.messages.count_tokens(model=sdk.MODEL, messages=sdk.SUM).input_tokens == len(
                sdk.prompt_ids(sdk.SUM)
            )
