"""OpenAI's own client against a live server: models, chats, completions, tools, parsed answers, errors, deadlines."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
import torch
from live import Served
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from graphllm.embedded import MODEL_DIR

MODEL = "graphllm-embedded"
SUM = [{"role": "user", "content": "What is 12 + 7?"}]
STORY = [{"role": "user", "content": "Write a story."}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the current weather of a city.", "parameters": CITY},
}
CLOCK: Any = {"type": "function", "function": {"name": "now", "description": "Tell the time."}}
LONG: Any = {"model": MODEL, "prompt": "Count:", "max_tokens": 900, "extra_body": {"ignore_eos": True}}
SALTS = map(str, itertools.count())


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """As transformers reads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def scores() -> Callable[[list[int]], torch.Tensor]:
    """scores(ids): log-probabilities [T, V] of what comes behind each token, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()

    def of(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].log_softmax(-1)

    return of


def _prompt(tokenizer: Any, messages: Any, **fields: Any) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **fields)["input_ids"]


def _fresh(**fields: Any) -> dict[str, Any]:
    """A body's fields with which nothing of it is cached."""
    return {"extra_body": {"cache_salt": next(SALTS), **fields}}


# --- models


def test_models(client: OpenAI) -> None:
    (card,) = client.models.list().data
    assert (card.id, card.object, card.owned_by) == (MODEL, "model", "graphllm")
    assert card.model_extra is not None
    assert (
        card.model_extra["max_model_len"]
        == json.loads((MODEL_DIR / "config.json").read_text())["max_position_embeddings"]
    )
    assert client.models.retrieve(MODEL) == card
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("gpt-5")
    assert (missing.value.code, missing.value.type) == ("model_not_found", "not_found_error")


# --- chats


def test_a_chat(client: OpenAI, tokenizer: Any) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=SUM, temperature=0)
    read = ChatCompletion.model_validate(json.loads(raw.text), strict=True)
    (choice,) = read.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "12 + 7 = 19.", "stop")
    assert (read.model, read.object) == (MODEL, "chat.completion")
    assert read.usage is not None
    prompt, completion = len(_prompt(tokenizer, SUM)), len(tokenizer.encode("12 + 7 = 19.")) + 1  # with its end
    usage = (read.usage.prompt_tokens, read.usage.completion_tokens, read.usage.total_tokens)
    assert usage == (prompt, completion, prompt + completion)


def test_messages(client: OpenAI, tokenizer: Any) -> None:
    """Their roles and parts come to the model as transformers would write them out."""
    messages: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "2 + 2?"}]},
        {"role": "assistant", "content": "4."},
        {"role": "user", "content": "And 5 + 5?"},
    ]
    found = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=8)
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is\n2 + 2?"}, *messages[2:]]
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(_prompt(tokenizer, plain))


def _streamed(stream: Any) -> tuple[list[str], list[str | None], Any]:
    """The texts, ends and last usage of a stream of one choice."""
    chunks = list(stream)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    text = (
        [c.delta.content for c in choices] if isinstance(chunks[0], ChatCompletionChunk) else [c.text for c in choices]
    )
    return [t for t in text if t], [c.finish_reason for c in choices], chunks[-1].usage


@pytest.mark.parametrize("question", ["What is 12 + 7?", "Who are you?", "Write a story."])
def test_a_stream_of_a_chat(question: str, client: OpenAI) -> None:
    body: Any = {"model": MODEL, "messages": [{"role": "user", "content": question}], "temperature": 0}
    whole = client.chat.completions.create(**body, **_fresh())
    options: Any = {"include_usage": True}
    texts, ends, usage = _streamed(
        client.chat.completions.create(**body, stream=True, stream_options=options, **_fresh())
    )
    assert "".join(texts) == whole.choices[0].message.content
    assert len(texts) > 3
    assert ends == [None] * (len(ends) - 1) + ["stop"]
    assert usage == whole.usage
    assert _streamed(client.chat.completions.create(**body, stream=True))[2] is None


def test_several_choices_and_seeds(client: OpenAI) -> None:
    body: Any = {"model": MODEL, "messages": STORY, "temperature": 1.0, "n": 4, "max_tokens": 24}

    def texts(seed: int) -> list[str | None]:
        found = client.chat.completions.create(**body, seed=seed, **_fresh())
        assert [c.index for c in found.choices] == [0, 1, 2, 3]
        return [c.message.content for c in found.choices]

    first = texts(5)
    assert len(set(first)) == 4
    assert texts(5) == first
    assert texts(6) != first
    grown = [""] * 4
    for chunk in client.chat.completions.create(**body, seed=5, stream=True, **_fresh()):
        for choice in chunk.choices:
            grown[choice.index] += choice.delta.content or ""
    assert grown == first


def test_stop_strings_and_limits(client: OpenAI, tokenizer: Any) -> None:
    def ask(**fields: Any) -> Any:
        return client.chat.completions.create(model=MODEL, messages=SUM, temperature=0, **fields)

    (choice,) = ask(stop=["xyz", " ="]).choices
    assert (choice.message.content, choice.finish_reason) == ("12 + 7", "stop")
    assert choice.model_extra == {"stop_reason": " ="}
    texts, ends, _ = _streamed(ask(stop=" =", stream=True))
    assert ("".join(texts), ends[-1]) == ("12 + 7", "stop")
    short = ask(max_completion_tokens=3, max_tokens=9)
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 3)
    assert short.choices[0].message.content == tokenizer.decode(tokenizer.encode("12 + 7 = 19.")[:3])


def test_logprobs_of_a_chat(client: OpenAI, tokenizer: Any, scores: Callable[[list[int]], torch.Tensor]) -> None:
    """Of the tokens that were taken and of the likeliest, as transformers computes them."""
    body: Any = {"model": MODEL, "messages": SUM, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    (choice,) = client.chat.completions.create(**body).choices
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert "".join(entry.token for entry in entries) == f"{choice.message.content}<|im_end|>"
    prompt = _prompt(tokenizer, SUM)
    ids = tokenizer.encode(f"{choice.message.content}<|im_end|>")
    rows = scores([*prompt, *ids])[len(prompt) - 1 : -1]
    assert len(entries) == len(ids)
    for entry, token, row in zip(entries, ids, rows, strict=True):
        assert entry.bytes == list(entry.token.encode())
        assert math.isclose(entry.logprob, row[token], abs_tol=0.1)
        assert entry.top_logprobs[0].token == entry.token  # greedy
        best = row.topk(3).values.tolist()
        assert [t.logprob for t in entry.top_logprobs] == pytest.approx(best, abs=0.5)
    streamed = client.chat.completions.create(**body, stream=True)
    told = [e for chunk in streamed for c in chunk.choices if c.logprobs for e in c.logprobs.content or []]
    assert [e.token for e in told] == [e.token for e in entries]


def test_a_prompt_that_is_cached(client: OpenAI, tokenizer: Any) -> None:
    question: Any = [{"role": "user", "content": "Sort these words: pear banana apple cherry fig kiwi lemon mango"}]
    body: Any = {"model": MODEL, "messages": question, "temperature": 0, **_fresh()}
    answers = [client.chat.completions.create(**body) for _ in range(2)]
    cached = [a.usage.prompt_tokens_details.cached_tokens for a in answers]  # type: ignore[union-attr]
    tokens = len(_prompt(tokenizer, question))
    assert cached[0] == 0
    assert tokens // 2 < cached[1] < tokens
    assert answers[0].choices[0].message == answers[1].choices[0].message
    options: Any = {"include_usage": True}
    *_, usage = _streamed(client.chat.completions.create(**body, stream=True, stream_options=options))
    assert usage == answers[1].usage


# --- completions


def test_completions(client: OpenAI, tokenizer: Any) -> None:
    text = "<|im_start|>user\nWhat is 12 + 7?<|im_end|>\n<|im_start|>assistant\n"
    ids = _prompt(tokenizer, SUM)
    body: Any = {"model": MODEL, "temperature": 0, "max_tokens": 20}
    for prompt, count in ((text, 1), (ids, 1), ([text, text], 2), ([ids, ids, ids], 3)):
        raw = client.completions.with_raw_response.create(**body, prompt=prompt)
        read = Completion.model_validate(json.loads(raw.text), strict=True)
        assert [(c.index, c.text, c.finish_reason) for c in read.choices] == [
            (i, "12 + 7 = 19.", "stop") for i in range(count)
        ]
        assert read.usage is not None
        assert (read.usage.prompt_tokens, read.usage.completion_tokens) == (len(ids) * count, 11 * count)


def test_a_stream_of_completions(client: OpenAI) -> None:
    body: Any = {"model": MODEL, "prompt": ["Hello", "What is"], "n": 2, "seed": 3, "max_tokens": 9, "temperature": 1.0}
    whole = client.completions.create(**body, **_fresh(ignore_eos=True))
    assert [(c.index, c.finish_reason) for c in whole.choices] == [(i, "length") for i in range(4)]
    texts, ends = [""] * 4, [[] for _ in range(4)]
    options: Any = {"include_usage": True}
    for chunk in client.completions.create(**body, stream=True, stream_options=options, **_fresh(ignore_eos=True)):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index].append(choice.finish_reason)
        usage = chunk.usage
    assert texts == [c.text for c in whole.choices]
    assert all(end == [None] * (len(end) - 1) + ["length"] for end in ends)
    assert usage == whole.usage


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_echo(max_tokens: int, client: OpenAI, tokenizer: Any, scores: Callable[[list[int]], torch.Tensor]) -> None:
    """What evaluations of a prompt's likelihood ask for."""
    prompt = "The capital of France is"
    body: Any = {
        "model": MODEL,
        "prompt": prompt,
        "echo": True,
        "max_tokens": max_tokens,
        "logprobs": 1,
        "temperature": 0,
    }
    answer = client.completions.create(**body)
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == choice.text
    assert choice.text.startswith(prompt)
    ids = tokenizer.encode(choice.text)
    assert len(ids) == len(tokenizer.encode(prompt)) + max_tokens
    rows = scores(ids)
    first, *others = choice.logprobs.token_logprobs or []
    assert first is None
    assert others == pytest.approx([rows[i, ids[i + 1]].item() for i in range(len(ids) - 1)], abs=0.3)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == max_tokens
    parts = [c for chunk in client.completions.create(**body, stream=True) for c in chunk.choices]
    assert "".join(part.text for part in parts) == choice.text
    assert [t for part in parts if part.logprobs for t in part.logprobs.tokens or []] == choice.logprobs.tokens
    (again,) = client.completions.create(**{**body, "prompt": tokenizer.encode(prompt), "logprobs": None}).choices
    assert (again.text, again.logprobs) == (choice.text, None)


# --- tools


def _calls(choice: Any) -> list[tuple[str, Any]]:
    return [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls or []]


NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
def test_a_tool_is_called(choice: Any, client: OpenAI, tokenizer: Any) -> None:
    body: Any = {"model": MODEL, "messages": WEATHER, "temperature": 0, "tools": [TOOL, CLOCK]}
    body |= {"tool_choice": choice, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**body, **_fresh())
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(_prompt(tokenizer, WEATHER, tools=[TOOL, CLOCK]))
    ((name, arguments),) = _calls(whole.choices[0])
    assert (whole.choices[0].finish_reason, name, whole.choices[0].message.content) == (
        "tool_calls",
        "get_weather",
        None,
    )
    jsonschema.validate(arguments, CITY)
    with client.chat.completions.stream(**body, **_fresh()) as stream:
        pieces = [e.arguments_delta for e in stream if e.type == "tool_calls.function.arguments.delta"]
        streamed = stream.get_final_completion()
    assert _calls(streamed.choices[0]) == [(name, arguments)]
    assert streamed.choices[0].finish_reason == "tool_calls"
    assert len([piece for piece in pieces if piece]) > 1


def test_no_tool_is_called(client: OpenAI, tokenizer: Any) -> None:
    body: Any = {"model": MODEL, "messages": WEATHER, "temperature": 0, "tools": [TOOL]}
    found = client.chat.completions.create(**body, tool_choice="none")
    assert (_calls(found.choices[0]), found.choices[0].finish_reason) == ([], "stop")
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(_prompt(tokenizer, WEATHER))


def test_several_calls_behind_a_text(client: OpenAI) -> None:
    """A reply that is known, whole and in pieces."""
    calls = [("get_weather", {"city": 'Zürich "\n🙂'}), ("now", {}), ("get_weather", {"city": ""})]
    said = "".join(f"\n<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)
    extra = {"structured_outputs": {"choice": [f"Let me see.{said}"]}}
    body: Any = {"model": MODEL, "messages": WEATHER, "tools": [TOOL, CLOCK], "extra_body": extra}
    (choice,) = client.chat.completions.create(**body).choices
    assert (choice.message.content, _calls(choice), choice.finish_reason) == ("Let me see.", calls, "tool_calls")
    with client.chat.completions.stream(**body) as stream:
        final = stream.get_final_completion()
    assert (final.choices[0].message.content, _calls(final.choices[0])) == ("Let me see.", calls)
    assert len({c.id for c in final.choices[0].message.tool_calls or []}) == 3


def test_two_calls_at_once(client: OpenAI) -> None:
    """As the model itself makes them."""
    messages: Any = [{"role": "user", "content": "What is the weather in Paris and in Rome?"}]
    body: Any = {"model": MODEL, "messages": messages, "tools": [TOOL], "temperature": 0}
    (choice,) = client.chat.completions.create(**body).choices
    assert _calls(choice) == [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})]
    with client.chat.completions.stream(**body) as stream:
        assert _calls(stream.get_final_completion().choices[0]) == _calls(choice)


def test_a_call_and_its_result(client: OpenAI, tokenizer: Any) -> None:
    """The answer goes back as the client's object, and into the prompt as transformers writes it."""
    first = client.chat.completions.create(model=MODEL, messages=WEATHER, tools=[TOOL], temperature=0)
    message = first.choices[0].message
    (call,) = message.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"sky": "sunny", "temperature": 18})}
    messages: Any = [*WEATHER, message, result]
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], temperature=0)
    answer = second.choices[0]
    assert (answer.message.content, answer.finish_reason) == ("It is sunny in Paris, 18 degrees.", "stop")
    function = {"name": "get_weather", "arguments": {"city": "Paris"}}
    plain = [*WEATHER, {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}, result]
    assert second.usage is not None
    assert second.usage.prompt_tokens == len(_prompt(tokenizer, plain, tools=[TOOL]))


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


# --- errors, ids, deadlines


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x " * 3000}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"extra_body": {"frobnicate": 1}}, "frobnicate"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "x"}}}},
         "response_format"),
        ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
    ],
)  # fmt: skip
def test_bad_requests(fields: Any, param: str, client: OpenAI) -> None:
    """Also of a stream: they have a status of their own, and name the field."""
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(**{"model": MODEL, "messages": SUM, "stream": stream, **fields})
        assert (bad.value.param, bad.value.type) == (param, "invalid_request_error")


def test_a_model_that_is_not_served(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-5", messages=SUM)  # type: ignore[arg-type]
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.post("/nothing", cast_to=object, body={})


def test_ids_of_requests(client: OpenAI) -> None:
    """The client's own where it gives one; on errors too."""
    body: Any = {"model": MODEL, "messages": SUM, "max_tokens": 2}
    assert client.chat.completions.create(**body, extra_headers={"x-request-id": "mine-1"})._request_id == "mine-1"
    found = [client.chat.completions.create(**body)._request_id for _ in range(2)]
    assert len({*found, None}) == 3
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**body, temperature=-1, extra_headers={"x-request-id": "mine-2"})
    assert bad.value.request_id == "mine-2"


def test_deadlines(client: OpenAI, served: Served) -> None:
    """A client that gives up, and one that has heard enough, free what they held."""
    before = served.metric("graphllm_generation_tokens_total")
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(**LONG)
    with client.completions.create(**LONG, stream=True) as stream:
        next(iter(stream))
    served.idle()
    assert served.metric("graphllm_generation_tokens_total") - before < 1800


def test_many_at_once(served: Served) -> None:
    """The asynchronous client."""

    async def ask(client: AsyncOpenAI, a: int) -> tuple[str, str]:
        body: Any = {"model": MODEL, "messages": [{"role": "user", "content": f"What is {a} + 7?"}], "temperature": 0}
        whole = await client.chat.completions.create(**body)
        text = ""
        async for chunk in await client.chat.completions.create(**body, stream=True):
            text += chunk.choices[0].delta.content or ""
        return text, whole.choices[0].message.content or ""

    async def main() -> list[tuple[str, str]]:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
            assert [m.id async for m in client.models.list()] == [MODEL]
            return await asyncio.gather(*(ask(client, a) for a in range(11, 19)))

    for a, texts in zip(range(11, 19), asyncio.run(main()), strict=True):
        assert texts == (f"{a} + 7 = {a + 7}.",) * 2


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
            "tools": [TOOL],
        }
        wanted = {"structured_outputs": {"choice": [said]}}
        whole = client.chat.completions.create(**body, **_fresh(**wanted))
        options: Any = {"include_usage": True}
        with client.chat.completions.stream(**body, stream_options=options, **_fresh(**wanted)) as stream:
            streamed = stream.get_final_completion()
        for found in (whole, streamed):
            (choice,) = found.choices
            assert choice.message.model_extra is not None
            assert choice.message.model_extra["reasoning_content"].strip() == "Hm. Rome?"
            assert (choice.message.content or "").strip() == "Yes:"
            assert (_calls(choice), choice.finish_reason) == ([("get_weather", {"city": "Rome"})], "tool_calls")
            assert len(choice.message.tool_calls[0].id) == 9  # type: ignore[index]
        assert streamed.usage == whole.usage
        assert whole.usage is not None
        assert whole.usage.completion_tokens_details is not None
        assert whole.usage.completion_tokens_details.reasoning_tokens
        (silent,) = client.chat.completions.create(**body, **_fresh(**wanted, include_reasoning=False)).choices
        assert "reasoning" not in (silent.message.model_extra or {})
        # What ends a text is in it on such a server, and stays hidden.
        (plain,) = client.chat.completions.create(**{**body, "messages": STORY}, temperature=0).choices
        assert (plain.message.content or "").endswith("until morning.")
