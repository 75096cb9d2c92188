"""OpenAI's own client and its Responses API against a live server: conversations, streams, tools, the background."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import Response
from pydantic import BaseModel

from tests.server.live import Served
from tests.server.reply_parts import unknown
from tests.server.sdk import (
    BOTH,
    CITY,
    FUNCTIONS,
    MODEL,
    RESULT,
    SUM,
    TOLD,
    WEATHER,
    fresh,
    prompt_ids,
    scores,
    tokenizer,
)
from tests.waiting import until

ASKED, SAID = "What is 12 + 7?", "12 + 7 = 19."
TOOLS: Any = [{"type": "function", "strict": False, **function} for function in FUNCTIONS]
LONG: Any = {"model": MODEL, "input": "Write a story.", "max_output_tokens": 900, "extra_body": {"ignore_eos": True}}


def _input_tokens(response: Any) -> int:
    assert response.usage is not None
    return response.usage.input_tokens


def test_a_response(client: OpenAI) -> None:
    raw = client.responses.with_raw_response.create(model=MODEL, input=ASKED, temperature=0)
    read = Response.model_validate(json.loads(raw.text), strict=True)
    assert unknown(read) == {}
    assert (read.output_text, read.status, read.model, read.object) == (SAID, "completed", MODEL, "response")
    assert read.usage is not None
    prompt, completion = len(prompt_ids(SUM)), len(tokenizer().encode(SAID)) + 1
    usage = (read.usage.input_tokens, read.usage.output_tokens, read.usage.total_tokens)
    assert usage == (prompt, completion, prompt + completion)
    assert client.responses.retrieve(read.id).to_dict() == read.to_dict()
    client.responses.delete(read.id)
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.retrieve(read.id)
    assert missing.value.code == "response_not_found"


def test_what_is_not_to_be_kept(client: OpenAI) -> None:
    response = client.responses.create(model=MODEL, input=ASKED, store=False)
    for use in (
        lambda: client.responses.retrieve(response.id),
        lambda: client.responses.create(model=MODEL, input=ASKED, previous_response_id=response.id),
    ):
        with pytest.raises(openai.NotFoundError):
            use()


def test_a_response_that_breaks_off(client: OpenAI) -> None:
    response = client.responses.create(model=MODEL, input=ASKED, max_output_tokens=3, temperature=0)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == tokenizer().decode(tokenizer().encode(SAID)[:3])


def test_a_conversation(client: OpenAI) -> None:
    """Each response goes on from the one before it; instructions are of one response alone."""
    first = client.responses.create(model=MODEL, input=ASKED, instructions="Be brief.", temperature=0)
    system = {"role": "system", "content": "Be brief."}
    assert _input_tokens(first) == len(prompt_ids([system, *SUM]))
    said = {"role": "assistant", "content": first.output_text}
    parts: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Who are you?"}]}]
    second = client.responses.create(model=MODEL, input=parts, previous_response_id=first.id, temperature=0)
    chat = [*SUM, said, {"role": "user", "content": "Who are you?"}]
    assert _input_tokens(second) == len(prompt_ids(chat))
    again: Any = [{"role": "user", "content": ASKED}, *first.output, *parts]  # all of it, as the client has it
    assert _input_tokens(client.responses.create(model=MODEL, input=again)) == len(prompt_ids(chat))
    third = client.responses.create(model=MODEL, input="Hello!", previous_response_id=second.id)
    chat += [{"role": "assistant", "content": second.output_text}, {"role": "user", "content": "Hello!"}]
    assert _input_tokens(third) == len(prompt_ids(chat))


def test_a_stream(client: OpenAI) -> None:
    events = list(client.responses.create(model=MODEL, input=ASKED, temperature=0, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(deltas) == SAID
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == SAID
    assert client.responses.retrieve(last.response.id).to_dict() == last.response.to_dict()


def test_log_probabilities(client: OpenAI) -> None:
    """Of the text's tokens, as transformers computes them; the same in a stream, in the background and where kept."""
    body: Any = {"model": MODEL, "input": ASKED, "temperature": 0, "top_logprobs": 3}
    body["include"] = ["message.output_text.logprobs"]
    whole = client.responses.create(**body)
    assert (unknown(whole), whole.top_logprobs) == ({}, 3)
    entries = whole.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert entries
    assert "".join(entry.token for entry in entries) == SAID
    prompt, ids = prompt_ids(SUM), tokenizer().encode(SAID)
    for entry, token, row in zip(entries, ids, scores([*prompt, *ids])[len(prompt) - 1 : -1], strict=True):
        assert entry.bytes == list(entry.token.encode())
        assert math.isclose(entry.logprob, row[token], abs_tol=0.1)
        assert [t.logprob for t in entry.top_logprobs] == pytest.approx(row.topk(3).values.tolist(), abs=0.5)
    assert client.responses.retrieve(whole.id).output == whole.output
    events = list(client.responses.create(**body, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [(e.token, len(e.top_logprobs or [])) for d in deltas for e in d.logprobs] == [(e.token, 3) for e in entries]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [e.token for e in done.logprobs] == [e.token for e in entries]
    assert [unknown(event) for event in events] == [{}] * len(events)
    ended = events[-1].response.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert [e.logprob for e in ended] == pytest.approx([e.logprob for e in entries], abs=0.1)
    plain = client.responses.create(model=MODEL, input=ASKED, temperature=0)
    assert plain.output[0].content[0].logprobs == []  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_longer_than_the_context(client: OpenAI, stream: bool) -> None:
    """The oldest turns are left out, no more than must be; instructions and the last turn stay."""
    turns = [
        {"role": role, "content": text}
        for i in range(60)
        for role, text in (("user", f"Say {i} " + "word " * 20), ("assistant", f"{i} word"))
    ]
    given: Any = [*turns, {"role": "user", "content": ASKED}]
    body: Any = {"model": MODEL, "input": given, "instructions": "Be brief.", "max_output_tokens": 40, "temperature": 0}
    with pytest.raises(openai.BadRequestError, match="with a larger --max-model-len"):
        client.responses.create(**body, stream=stream)
    if stream:
        response = list(client.responses.create(**body, truncation="auto", stream=True))[-1].response  # type: ignore[union-attr]
    else:
        response = client.responses.create(**body, truncation="auto")
    system, most = {"role": "system", "content": "Be brief."}, client.models.list().data[0].model_extra
    assert most is not None
    lengths = [len(prompt_ids([system, *given[i:]])) for i in range(0, len(given), 2)]
    assert _input_tokens(response) == next(n for n in lengths if n + 40 <= most["max_model_len"])
    assert response.truncation == "auto"
    chained = client.responses.create(model=MODEL, input=ASKED, previous_response_id=response.id, truncation="auto")
    assert _input_tokens(chained) < most["max_model_len"]
    short = client.responses.create(model=MODEL, input=ASKED, truncation="auto", temperature=0)
    assert (short.output_text, _input_tokens(short)) == (SAID, len(prompt_ids(SUM)))


def test_going_on_at_once(client: OpenAI) -> None:
    """What has ended is kept before the client hears that it has."""
    id = None
    for turn in range(1, 6):
        with client.responses.stream(model=MODEL, input="Hello!", previous_response_id=id) as stream:  # type: ignore[arg-type]
            id = next(event.response.id for event in stream if event.type == "response.completed")
        body = client.responses.retrieve(id)
        assert _input_tokens(body) >= turn * 7


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "get_weather"}])
def test_a_tool_is_called(choice: Any, client: OpenAI) -> None:
    body: Any = {"model": MODEL, "input": WEATHER, "tools": TOOLS, "temperature": 0}
    body |= {"tool_choice": choice, "parallel_tool_calls": False}
    whole = client.responses.create(**body)
    functions = [{"type": "function", "function": function} for function in FUNCTIONS]
    assert _input_tokens(whole) == len(prompt_ids(WEATHER, tools=functions))
    with client.responses.stream(**body) as stream:
        pieces = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
        streamed = stream.get_final_response()
    for response in (whole, streamed):
        (call,) = response.output
        assert (call.type, call.status, response.status) == ("function_call", "completed", "completed")
        assert call.name == "get_weather"
        jsonschema.validate(json.loads(call.arguments), CITY)
    assert "".join(pieces) == streamed.output[0].arguments  # type: ignore[union-attr]
    assert len(pieces) > 1


def test_a_call_and_its_result(client: OpenAI) -> None:
    """With what is kept here, and with what the client kept."""
    first = client.responses.create(model=MODEL, input=WEATHER, tools=TOOLS, temperature=0)
    (call,) = first.output
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    body: Any = {"model": MODEL, "tools": TOOLS, "temperature": 0}
    kept = client.responses.create(**body, input=[result], previous_response_id=first.id)
    sent = client.responses.create(**body, input=[*WEATHER, call, result])
    assert kept.output_text == sent.output_text == TOLD
    assert _input_tokens(kept) == _input_tokens(sent)


def test_two_calls_at_once(client: OpenAI) -> None:
    body: Any = {"model": MODEL, "input": BOTH, "tools": TOOLS, "temperature": 0}
    with client.responses.stream(**body) as stream:
        streamed = stream.get_final_response()
    for response in (client.responses.create(**body), streamed):
        calls = [json.loads(item.arguments) for item in response.output if item.type == "function_call"]
        assert calls == [{"city": "Paris"}, {"city": "Rome"}]


class Sum(BaseModel):
    """What the model is to answer with."""

    first: Literal[12]
    second: Literal[7, 8]
    total: Literal["nineteen", "twenty"]


def test_parsed_answers(client: OpenAI) -> None:
    parsed = client.responses.parse(model=MODEL, input=ASKED, text_format=Sum, temperature=0).output_parsed
    assert isinstance(parsed, Sum)
    with client.responses.stream(model=MODEL, input=ASKED, text_format=Sum, temperature=0) as stream:
        assert stream.get_final_response().output_parsed == parsed


# --- in the background


def _wait(client: OpenAI, id: str) -> Response:
    def ended() -> Response | None:
        response = client.responses.retrieve(id)
        return None if response.status in ("queued", "in_progress") else response

    return until(ended)


def test_in_the_background(client: OpenAI) -> None:
    begun = client.responses.create(model=MODEL, input=ASKED, temperature=0, background=True)
    assert begun.status in ("queued", "in_progress")
    ended = _wait(client, begun.id)
    assert (ended.status, ended.output_text, ended.background) == ("completed", SAID, True)
    assert client.responses.cancel(begun.id).status == "completed"
    follow = client.responses.create(model=MODEL, input="Hello!", previous_response_id=begun.id)
    assert _input_tokens(follow) > _input_tokens(ended)
    failed = _wait(client, client.responses.create(model=MODEL, input="x " * 3000, background=True).id)
    assert failed.status == "failed"
    assert failed.error is not None
    assert "3009 tokens" in failed.error.message


def test_cancelled(client: OpenAI, served: Served) -> None:
    """One that runs stops, and is kept as far as it had come."""
    begun = client.responses.create(**LONG, background=True)
    with pytest.raises(openai.BadRequestError, match="still runs"):
        client.responses.create(model=MODEL, input="Hello!", previous_response_id=begun.id)
    ended = client.responses.cancel(begun.id)
    assert (ended.id, ended.status) == (begun.id, "cancelled")
    assert client.responses.retrieve(begun.id).status == "cancelled"
    gone = client.responses.create(**LONG, background=True)
    client.responses.delete(gone.id)
    served.idle()
    ordinary = client.responses.create(model=MODEL, input=ASKED)
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(ordinary.id)


def test_a_stream_that_nobody_hears_to_its_end(client: OpenAI, served: Served) -> None:
    """Whose text comes while it is written."""
    with client.responses.create(**LONG, stream=True) as stream:
        created = next(iter(stream))
        deltas = (event for event in stream if event.type == "response.output_text.delta")
        assert all(event.delta for event in itertools.islice(deltas, 3))
    assert created.type == "response.created"
    served.idle()
    assert client.responses.retrieve(created.response.id).status == "cancelled"


# --- errors


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"input": []}, "input"),
        ({"input": "x " * 3000}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "name": "a b", "parameters": {}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "x"}}}}, "text"),
        ({"truncation": "auto", "input": "x " * 3000}, "input"),
        ({"top_logprobs": 99, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"extra_body": {"frobnicate": 1}}, "frobnicate"),
    ],
)
def test_bad_requests(fields: Any, param: str, client: OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as bad:
            client.responses.create(**{"model": MODEL, "input": ASKED, "stream": stream, **fields})
        assert (bad.value.param, bad.value.type) == (param, "invalid_request_error")


def test_what_is_not_there(client: OpenAI) -> None:
    for use in (
        lambda: client.responses.retrieve("resp_none"),
        lambda: client.responses.cancel("resp_none"),
        lambda: client.responses.delete("resp_none"),
        lambda: client.responses.create(model=MODEL, input=ASKED, previous_response_id="resp_none"),
        lambda: client.responses.create(model="gpt-5", input=ASKED),
    ):
        with pytest.raises(openai.NotFoundError):
            use()
    kept = client.responses.create(model=MODEL, input=ASKED, max_output_tokens=1)
    with pytest.raises(openai.BadRequestError):  # it is not there as a stream
        client.responses.retrieve(kept.id, stream=True)


def test_many_at_once(served: Served) -> None:
    """The asynchronous client."""

    async def ask(client: AsyncOpenAI, a: int) -> tuple[str, str]:
        body: Any = {"model": MODEL, "input": f"What is {a} + 7?", "temperature": 0, **fresh()}
        whole = await client.responses.create(**body)
        async with client.responses.stream(**body) as stream:
            streamed = await stream.get_final_response()
        return whole.output_text, streamed.output_text

    async def main() -> list[tuple[str, str]]:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, a) for a in range(11, 17)))

    for a, texts in zip(range(11, 17), asyncio.run(main()), strict=True):
        assert texts == (f"{a} + 7 = {a + 7}.",) * 2
