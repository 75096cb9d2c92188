"""OpenAI's own client against a live server: models, chats, completions, errors, deadlines, many at once."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from graphllm.embedded import MODEL_DIR
from tests.server.live import Served
from tests.server.sdk import MODEL, STORY, SUM, fresh, prompt_ids, scores, tokenizer
from tests.waiting import PATIENCE, until

LONG: Any = {"model": MODEL, "prompt": "Count:", "max_tokens": 900, "extra_body": {"ignore_eos": True}}


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


def test_a_chat(client: OpenAI) -> None:
    (card,) = client.models.list()
    asked = until(lambda: (now := int(time.time())) > card.created and now)  # another second than the server's start
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=SUM, temperature=0)
    read = ChatCompletion.model_validate(json.loads(raw.text), strict=True)
    (choice,) = read.choices
    assert asked <= read.created <= time.time()
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "12 + 7 = 19.", "stop")
    assert (read.model, read.object) == (MODEL, "chat.completion")
    assert read.usage is not None
    prompt, completion = len(prompt_ids(SUM)), len(tokenizer().encode("12 + 7 = 19.")) + 1  # with its end
    usage = (read.usage.prompt_tokens, read.usage.completion_tokens, read.usage.total_tokens)
    assert usage == (prompt, completion, prompt + completion)


def test_messages(client: OpenAI) -> None:
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
    assert found.usage.prompt_tokens == len(prompt_ids(plain))


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
    whole = client.chat.completions.create(**body, **fresh())
    options: Any = {"include_usage": True}
    texts, ends, usage = _streamed(
        client.chat.completions.create(**body, stream=True, stream_options=options, **fresh())
    )
    assert "".join(texts) == whole.choices[0].message.content
    assert len(texts) > 1  # a slow reader gets several tokens at once
    assert ends == [None] * (len(ends) - 1) + ["stop"]
    assert usage == whole.usage
    assert _streamed(client.chat.completions.create(**body, stream=True))[2] is None


def test_several_choices_and_seeds(client: OpenAI) -> None:
    body: Any = {"model": MODEL, "messages": STORY, "temperature": 3.0, "n": 4, "max_tokens": 24}

    def texts(seed: int) -> list[str | None]:
        found = client.chat.completions.create(**body, seed=seed, **fresh())
        assert [c.index for c in found.choices] == [0, 1, 2, 3]
        return [c.message.content for c in found.choices]

    first = texts(5)
    assert len(set(first)) == 4
    assert texts(5) == first
    assert texts(6) != first
    grown = [""] * 4
    for chunk in client.chat.completions.create(**body, seed=5, stream=True, **fresh()):
        for choice in chunk.choices:
            grown[choice.index] += choice.delta.content or ""
    assert grown == first


def test_stop_strings_and_limits(client: OpenAI) -> None:
    def ask(**fields: Any) -> Any:
        return client.chat.completions.create(model=MODEL, messages=SUM, temperature=0, **fields)

    (choice,) = ask(stop=["xyz", " ="]).choices
    assert (choice.message.content, choice.finish_reason) == ("12 + 7", "stop")
    assert choice.model_extra == {"stop_reason": " ="}
    texts, ends, _ = _streamed(ask(stop=" =", stream=True))
    assert ("".join(texts), ends[-1]) == ("12 + 7", "stop")
    short = ask(max_completion_tokens=3, max_tokens=9)
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 3)
    assert short.choices[0].message.content == tokenizer().decode(tokenizer().encode("12 + 7 = 19.")[:3])


def test_logprobs_of_a_chat(client: OpenAI) -> None:
    """Of the tokens that were taken and of the likeliest, as transformers computes them."""
    body: Any = {"model": MODEL, "messages": SUM, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    (choice,) = client.chat.completions.create(**body).choices
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert "".join(entry.token for entry in entries) == f"{choice.message.content}<|im_end|>"
    prompt = prompt_ids(SUM)
    ids = tokenizer().encode(f"{choice.message.content}<|im_end|>")
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


@pytest.mark.thorough
def test_logprobs_of_the_whole_vocabulary(serve: Callable[..., Served], client: OpenAI) -> None:
    """Where the server was started for it; and any number of them."""
    body: Any = {"model": MODEL, "messages": SUM, "temperature": 0, "logprobs": True, "max_tokens": 2}
    with pytest.raises(openai.BadRequestError, match="servers started with --max-logprobs -1"):
        client.chat.completions.create(**body, top_logprobs=-1)
    server = serve("--artifact", "build", "--backend", "eager", "--max-logprobs", -1).wait_ready()
    prompt = prompt_ids(SUM)
    with OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE) as asking:
        for count, stream in ((-1, False), (-1, True), (300, False)):
            answered: Any = asking.chat.completions.create(**body, top_logprobs=count, stream=stream)
            parts = list(answered) if stream else [answered]
            entries = [e for part in parts for c in part.choices if c.logprobs for e in c.logprobs.content or []]
            ids = tokenizer().encode("12 + 7 = 19.")[:2]
            for entry, row in zip(entries, scores([*prompt, *ids])[len(prompt) - 1 : -1], strict=True):
                best = row.sort(descending=True).values[: count if count > 0 else None].tolist()
                assert [t.logprob for t in entry.top_logprobs] == pytest.approx(best, abs=0.5)
        (choice,) = asking.completions.create(model=MODEL, prompt="The cat", max_tokens=1, logprobs=100).choices
        listed = choice.logprobs
        assert listed is not None
        assert 90 < len((listed.top_logprobs or [{}])[0]) <= 101  # some tokens have the same text


def test_a_prompt_that_is_cached(client: OpenAI) -> None:
    question: Any = [{"role": "user", "content": "Sort these words: pear banana apple cherry fig kiwi lemon mango"}]
    body: Any = {"model": MODEL, "messages": question, "temperature": 0, **fresh()}
    answers = [client.chat.completions.create(**body) for _ in range(2)]
    cached = [a.usage.prompt_tokens_details.cached_tokens for a in answers]  # type: ignore[union-attr]
    tokens = len(prompt_ids(question))
    assert cached[0] == 0
    assert tokens // 2 < cached[1] < tokens
    assert answers[0].choices[0].message == answers[1].choices[0].message
    options: Any = {"include_usage": True}
    *_, usage = _streamed(client.chat.completions.create(**body, stream=True, stream_options=options))
    assert usage == answers[1].usage


# --- completions


def test_completions(client: OpenAI) -> None:
    text = "<|im_start|>user\nWhat is 12 + 7?<|im_end|>\n<|im_start|>assistant\n"
    ids = prompt_ids(SUM)
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
    whole = client.completions.create(**body, **fresh(ignore_eos=True))
    assert [(c.index, c.finish_reason) for c in whole.choices] == [(i, "length") for i in range(4)]
    texts, ends = [""] * 4, [[] for _ in range(4)]
    options: Any = {"include_usage": True}
    for chunk in client.completions.create(**body, stream=True, stream_options=options, **fresh(ignore_eos=True)):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index].append(choice.finish_reason)
        usage = chunk.usage
    assert texts == [c.text for c in whole.choices]
    assert all(end == [None] * (len(end) - 1) + ["length"] for end in ends)
    assert usage == whole.usage


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_echo(max_tokens: int, client: OpenAI) -> None:
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
    ids = tokenizer().encode(choice.text)
    assert len(ids) == len(tokenizer().encode(prompt)) + max_tokens
    rows = scores(ids)
    first, *others = choice.logprobs.token_logprobs or []
    assert first is None
    assert others == pytest.approx([rows[i, ids[i + 1]].item() for i in range(len(ids) - 1)], abs=0.3)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == max_tokens
    parts = [c for chunk in client.completions.create(**body, stream=True) for c in chunk.choices]
    assert "".join(part.text for part in parts) == choice.text
    assert [t for part in parts if part.logprobs for t in part.logprobs.tokens or []] == choice.logprobs.tokens
    (again,) = client.completions.create(**{**body, "prompt": tokenizer().encode(prompt), "logprobs": None}).choices
    assert (again.text, again.logprobs) == (choice.text, None)


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
