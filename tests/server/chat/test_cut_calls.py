"""Tool calls that max_tokens cuts, at every token, by the APIs' own clients: streamed or whole, a reply has text and
calls, none of what is written around them, and can be sent back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import anthropic
import openai
import pytest

from tests.server.live import Served
from tests.server.sdk import BOTH, FUNCTIONS, MODEL, TOOLS
from tests.tiers import thorough


class Reply(NamedTuple):
    """What a client has read. calls: names and arguments. ended: why. turn: what it sends back."""

    text: str
    calls: list[tuple[str, Any]]
    ended: str
    turn: list[Any]


class Api(NamedTuple):
    """length: what it calls the end by max_tokens. step: between the limits that are tried. ask: with a choice of
    tools, streamed or not, a limit of tokens, and what was said since."""

    length: str
    step: int
    ask: Callable[[str, bool, int, list[Any]], Reply]


def _openai(client: openai.OpenAI) -> Api:
    def ask(choice: str, streamed: bool, most: int, turn: list[Any]) -> Reply:
        chosen = {"type": "function", "function": {"name": "get_weather"}} if choice == "named" else choice
        body: Any = {"model": MODEL, "messages": [*BOTH, *turn], "tools": TOOLS, "tool_choice": chosen}
        body |= {"temperature": 0, "max_tokens": most}
        if streamed:
            with client.chat.completions.stream(**body) as stream:
                try:
                    found = stream.get_final_completion()
                except openai.LengthFinishReasonError as cut:
                    found = cut.completion  # type: ignore[assignment]
        else:
            found = client.chat.completions.create(**body)
        (only,) = found.choices
        calls = [(c.function.name, json.loads(c.function.arguments)) for c in only.message.tool_calls or []]
        results = [{"role": "tool", "tool_call_id": c.id, "content": "-"} for c in only.message.tool_calls or []]
        return Reply(only.message.content or "", calls, only.finish_reason, [only.message, *results])

    return Api("length", 2, ask)


def _anthropic(client: anthropic.Anthropic) -> Api:
    tools: Any = [
        {"name": f["name"], "input_schema": f["parameters"], "description": f["description"]} for f in FUNCTIONS
    ]
    choices: Any = {"auto": {"type": "auto"}, "required": {"type": "any"}}
    choices |= {"named": {"type": "tool", "name": "get_weather"}}

    def ask(choice: str, streamed: bool, most: int, turn: list[Any]) -> Reply:
        body: Any = {"model": MODEL, "messages": [*BOTH, *turn], "tools": tools, "tool_choice": choices[choice]}
        body |= {"max_tokens": most, "extra_body": {"temperature": 0}}
        if streamed:
            with client.messages.stream(**body) as stream:
                found: Any = stream.get_final_message()
        else:
            found = client.messages.create(**body)
        calls = [block for block in found.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": c.id, "content": "-"} for c in calls]
        content = [block.model_dump(include={"type", "text", "id", "name", "input"}) for block in found.content]
        text = "".join(block.text for block in found.content if block.type == "text")
        answer: list[Any] = [*results, {"type": "text", "text": "Go on."}]
        turn = [{"role": "assistant", "content": content}, {"role": "user", "content": answer}]
        return Reply(text, [(c.name, c.input) for c in calls], found.stop_reason, turn)

    return Api("max_tokens", 3, ask)


def _responses(client: openai.OpenAI) -> Api:
    tools: Any = [{"type": "function", **function} for function in FUNCTIONS]

    def ask(choice: str, streamed: bool, most: int, turn: list[Any]) -> Reply:
        chosen = {"type": "function", "name": "get_weather"} if choice == "named" else choice
        body: Any = {"model": MODEL, "input": [*BOTH, *turn], "tools": tools, "tool_choice": chosen}
        body |= {"max_output_tokens": most, "temperature": 0, "store": False}
        if streamed:
            with client.responses.stream(**body) as stream:
                found: Any = list(stream)[-1].response
        else:
            found = client.responses.create(**body)
        calls = [item for item in found.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": c.call_id, "output": "-"} for c in calls]
        items = [
            item.model_dump(exclude={"parsed_arguments"}, exclude_none=True, warnings=False) for item in found.output
        ]
        for item in items:
            for part in item.get("content", []):
                part.pop("parsed", None)
        ended = "length" if found.status == "incomplete" else found.status
        arguments = [(c.name, json.loads(c.arguments)) for c in calls]
        return Reply(found.output_text, arguments, ended, [*items, *results])

    return Api("length", 3, ask)


@pytest.fixture(params=["chat", "messages", "responses"])
def api(request: pytest.FixtureRequest, served: Served) -> Iterator[Api]:
    if request.param == "messages":
        with anthropic.Anthropic(base_url=served.url, api_key="any", max_retries=0) as client:
            yield _anthropic(client)
    else:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as other:
            yield (_openai if request.param == "chat" else _responses)(other)


@pytest.mark.parametrize("choice", ["auto", thorough("required"), thorough("named")])
def test_calls_that_are_cut(choice: str, api: Api) -> None:
    sent: list[Any] = []
    for most in range(1, 40, api.step):
        reply, streamed = (api.ask(choice, way, most, []) for way in (False, True))
        assert reply[:3] == streamed[:3]
        if reply.ended != api.length:
            assert choice == "named"
            break
        assert reply.text == ""
        for name, arguments in reply.calls:
            assert name == "get_weather"
            assert list(arguments) in ([], ["city"])
            assert not arguments or any(city.startswith(arguments["city"]) for city in ("Paris", "Rome"))
        if reply.calls not in [earlier.calls for earlier in sent]:
            sent.append(reply)
            api.ask(choice, False, 1, reply.turn)  # which is no mistake
    assert any(reply.calls for reply in sent)
