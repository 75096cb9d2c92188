"""OpenAI's own client against a live server: tools, parsed answers, reasoning, keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.server.live import Served
from tests.server.sdk import (
    BOTH,
    FUNCTIONS,
    MODEL,
    RESULT,
    STORY,
    SUM,
    TOLD,
    TOOLS,
    WEATHER,
    fresh,
    prompt_ids,
    tokenizer,
)

# --- tools


def _calls(choice: Any) -> list[tuple[str, Any]]:
    return [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls or []]


NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
def test_a_tool_is_called(choice: Any, client: OpenAI) -> None:
    body: Any = {"model": MODEL, "messages": WEATHER, "temperature": 0, "tools": TOOLS}
    body |= {"tool_choice": choice, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**body, **fresh())
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(prompt_ids(WEATHER, tools=TOOLS))
    ((name, arguments),) = _calls(whole.choices[0])
    assert (whole.choices[0].finish_reason, whole.choices[0].message.content) == ("tool_calls", None)
    assert (name, arguments) == ("get_weather", {"city": "Paris"})
    with client.chat.completions.stream(**body, **fresh()) as stream:
        pieces = [e.arguments_delta for e in stream if e.type == "tool_calls.function.arguments.delta"]
        streamed = stream.get_final_completion()
    assert _calls(streamed.choices[0]) == [(name, arguments)]
    assert streamed.choices[0].finish_reason == "tool_calls"
    assert len([piece for piece in pieces if piece]) > 1


def test_no_tool_is_called(client: OpenAI) -> None:
    body: Any = {"model": MODEL, "messages": WEATHER, "temperature": 0, "tools": TOOLS}
    found = client.chat.completions.create(**body, tool_choice="none")
    assert (_calls(found.choices[0]), found.choices[0].finish_reason) == ([], "stop")
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(prompt_ids(WEATHER))


def test_several_calls_behind_a_text(client: OpenAI) -> None:
    """A reply that is known, whole and in pieces."""
    calls = [("get_weather", {"city": 'Zürich "\n🙂'}), ("get_time", {}), ("get_weather", {"city": ""})]
    said = "".join(f"\n<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)
    extra = {"structured_outputs": {"choice": [f"Let me see.{said}"]}}
    body: Any = {"model": MODEL, "messages": WEATHER, "tools": TOOLS, "extra_body": extra}
    (choice,) = client.chat.completions.create(**body).choices
    assert (choice.message.content, _calls(choice), choice.finish_reason) == ("Let me see.", calls, "tool_calls")
    with client.chat.completions.stream(**body) as stream:
        final = stream.get_final_completion()
    assert (final.choices[0].message.content, _calls(final.choices[0])) == ("Let me see.", calls)
    assert len({c.id for c in final.choices[0].message.tool_calls or []}) == 3


def test_two_calls_at_once(client: OpenAI) -> None:
    """As the model itself makes them."""
    body: Any = {"model": MODEL, "messages": BOTH, "tools": TOOLS, "temperature": 0}
    (choice,) = client.chat.completions.create(**body).choices
    assert _calls(choice) == [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})]
    with client.chat.completions.stream(**body) as stream:
        assert _calls(stream.get_final_completion().choices[0]) == _calls(choice)


def test_two_calls_that_must_be_made(client: OpenAI) -> None:
    """The model says the same under the grammar, whatever else follows."""
    body: Any = {"model": MODEL, "messages": BOTH, "tools": TOOLS, "temperature": 0, "tool_choice": "required"}
    (choice,) = client.chat.completions.create(**body).choices
    assert _calls(choice)[:2] == [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})]


def test_one_call_at_most(client: OpenAI) -> None:
    """The second one is not generated at all."""
    body: Any = {"model": MODEL, "messages": BOTH, "tools": TOOLS, "temperature": 0}
    both = client.chat.completions.create(**body, **fresh())
    one = client.chat.completions.create(**body, parallel_tool_calls=False, **fresh())
    with client.chat.completions.stream(
        **body, parallel_tool_calls=False, stream_options={"include_usage": True}, **fresh()
    ) as stream:
        streamed = stream.get_final_completion()
    for found in (one, streamed):
        (choice,) = found.choices
        assert _calls(choice) == [("get_weather", {"city": "Paris"})] == _calls(both.choices[0])[:1]
        assert (choice.message.content or None, choice.finish_reason) == (None, "tool_calls")
        assert found.usage is not None
        assert both.usage is not None
        assert found.usage.completion_tokens < both.usage.completion_tokens * 0.6
    several = client.chat.completions.create(**{**body, "temperature": 0.3}, n=3, parallel_tool_calls=False, seed=1)
    assert [len(_calls(choice)) for choice in several.choices] == [1, 1, 1]


def test_a_call_and_its_result(client: OpenAI) -> None:
    """The answer goes back as the client's object, and into the prompt as transformers writes it."""
    first = client.chat.completions.create(model=MODEL, messages=WEATHER, tools=TOOLS, temperature=0)
    message = first.choices[0].message
    (call,) = message.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    messages: Any = [*WEATHER, message, result]
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, temperature=0)
    answer = second.choices[0]
    assert (answer.message.content, answer.finish_reason) == (TOLD, "stop")
    function = {"name": "get_weather", "arguments": {"city": "Paris"}}
    plain = [*WEATHER, {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}, result]
    assert second.usage is not None
    assert second.usage.prompt_tokens == len(prompt_ids(plain, tools=TOOLS))


# --- answers that are parsed


class Sum(BaseModel):
    """What the model is to answer with."""

    first: Literal[12]
    second: Literal[7, 8]
    total: Literal["nineteen", "twenty"]


class Weather(BaseModel):
    """Ask for the weather."""

    city: Literal["Paris", "Rome"]


def test_parsed_answers(client: OpenAI) -> None:
    body: Any = {"model": MODEL, "messages": SUM, "response_format": Sum, "temperature": 0}
    parsed = client.chat.completions.parse(**body).choices[0].message.parsed
    assert isinstance(parsed, Sum)
    with client.chat.completions.stream(**body) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed
    assert kinds == {"chunk", "content.delta", "content.done"}
    found = client.chat.completions.create(
        model=MODEL, messages=SUM, response_format={"type": "json_object"}, max_tokens=60
    )
    assert (found.choices[0].message.content or "").lstrip().startswith("{")


def test_parsed_calls(client: OpenAI) -> None:
    tool = openai.pydantic_function_tool(Weather)
    body: Any = {"model": MODEL, "messages": WEATHER, "tools": [tool], "temperature": 0, "parallel_tool_calls": False}
    found = client.chat.completions.parse(**body, tool_choice="required")
    (call,) = found.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == Weather(city="Paris")
    with client.chat.completions.stream(**body, tool_choice="required") as stream:
        (done,) = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert (done.name, done.parsed_arguments) == ("Weather", Weather(city="Paris"))


# --- another server


def test_keys_reasoning_and_other_models_ways(serve: Callable[..., Served]) -> None:
    """A server with a key, whose model would think in tags and call tools as Mistral's do."""
    server = serve("--api-key", "sesame", "--reasoning-parser", "think", "--tool-call-parser", "mistral").wait_ready()
    url, call = f"{server.url}/v1", '{"name": "get_weather", "arguments": {"city": "Rome"}}'
    with OpenAI(base_url=url, api_key="wrong", max_retries=0) as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    with OpenAI(base_url=url, api_key="sesame", max_retries=0) as client:
        said = f"<think>\nHm. Rome?\n</think>\n\nYes: [TOOL_CALLS][{call}]"
        body: Any = {
            "model": MODEL,
            "messages": WEATHER,
            "tools": TOOLS,
        }
        wanted = {"structured_outputs": {"choice": [said]}}
        whole = client.chat.completions.create(**body, **fresh(**wanted))
        options: Any = {"include_usage": True}
        with client.chat.completions.stream(**body, stream_options=options, **fresh(**wanted)) as stream:
            streamed = stream.get_final_completion()
        for found in (whole, streamed):
            (choice,) = found.choices
            assert choice.message.model_extra is not None
            assert choice.message.model_extra["reasoning_content"] == "Hm. Rome?"
            assert (choice.message.content or "").strip() == "Yes:"
            assert (_calls(choice), choice.finish_reason) == ([("get_weather", {"city": "Rome"})], "tool_calls")
            assert len(choice.message.tool_calls[0].id) == 9  # type: ignore[index]
        assert streamed.usage == whole.usage
        assert whole.usage is not None
        assert whole.usage.completion_tokens_details is not None
        assert whole.usage.completion_tokens_details.reasoning_tokens == len(tokenizer().encode("Hm. Rome?"))
        tools: Any = [{"type": "function", **function} for function in FUNCTIONS]
        response = client.responses.create(model=MODEL, input=WEATHER, tools=tools, extra_body=wanted)
        thought, message, made = response.output
        assert (thought.type, message.type, made.type) == ("reasoning", "message", "function_call")
        assert thought.content[0].text == "Hm. Rome?"
        assert response.usage is not None
        tokens = whole.usage.completion_tokens_details.reasoning_tokens
        assert response.usage.output_tokens_details.reasoning_tokens == tokens
        (silent,) = client.chat.completions.create(**body, **fresh(**wanted, include_reasoning=False)).choices
        assert "reasoning" not in (silent.message.model_extra or {})
        # What ends a text is in it on such a server, and stays hidden.
        (plain,) = client.chat.completions.create(**{**body, "messages": STORY}, temperature=0).choices
        assert (plain.message.content or "").endswith("until morning.")
