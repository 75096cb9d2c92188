"""vLLM's fields of requests over a live server, through OpenAI's client, against transformers."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from graphllm.engine.structured.compilers import compiler_class
from tests.server.live import Served
from tests.server.sdk import MODEL, STORY, SUM, prompt_ids, scores, tokenizer
from tests.waiting import PATIENCE

BEGUN: Any = [*SUM, {"role": "assistant", "content": "12 + 7 ="}]


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE) as client:
        yield client


def _chat(client: OpenAI, messages: Any = SUM, **fields: Any) -> Any:
    known = {name: fields.pop(name) for name in ("stream", "n", "logprobs", "top_logprobs") if name in fields}
    body: Any = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 24, **known}
    return client.chat.completions.create(**body, extra_body=fields)


def _complete(client: OpenAI, prompt: Any, **fields: Any) -> Any:
    known = {name: fields.pop(name) for name in ("stream", "n", "logprobs", "echo", "suffix") if name in fields}
    body: Any = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 8, **known}
    return client.completions.create(**body, extra_body=fields)


# --- token ids


def test_token_ids_of_a_chat(client: OpenAI) -> None:
    whole = _chat(client, return_token_ids=True, return_prompt_text=True)
    text = tokenizer().apply_chat_template(SUM, add_generation_prompt=True, tokenize=False)
    assert (whole.prompt_token_ids, whole.prompt_text) == (prompt_ids(SUM), text)
    ids = whole.choices[0].token_ids
    assert tokenizer().decode(ids, skip_special_tokens=True) == whole.choices[0].message.content
    assert len(ids) == whole.usage.completion_tokens
    chunks = list(_chat(client, return_token_ids=True, stream=True))
    assert [c.prompt_token_ids for c in chunks if hasattr(c, "prompt_token_ids")] == [prompt_ids(SUM)]
    streamed = [i for c in chunks for choice in c.choices for i in getattr(choice, "token_ids", None) or []]
    assert streamed == ids


def test_token_ids_of_completions(client: OpenAI) -> None:
    prompts = ["The cat", "12 + 7 ="]
    whole = _complete(client, prompts, return_token_ids=True)
    for prompt, choice in zip(prompts, whole.choices, strict=True):
        assert choice.prompt_token_ids == tokenizer()(prompt)["input_ids"]
    streamed: dict[int, list[int]] = {0: [], 1: []}
    for chunk in _complete(client, prompts, return_token_ids=True, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.token_ids
    assert [streamed[0], streamed[1]] == [c.token_ids for c in whole.choices]


def test_tokens_as_token_ids(client: OpenAI) -> None:
    found = _chat(client, return_tokens_as_token_ids=True, return_token_ids=True, logprobs=True, top_logprobs=2)
    (choice,) = found.choices
    assert [entry.token for entry in choice.logprobs.content] == [f"token_id:{i}" for i in choice.token_ids]
    assert all(top.token.startswith("token_id:") for entry in choice.logprobs.content for top in entry.top_logprobs)
    plain = _complete(client, "The cat", logprobs=1, echo=True, return_tokens_as_token_ids=True, return_token_ids=True)
    (choice,) = plain.choices
    assert choice.logprobs.tokens == [f"token_id:{i}" for i in choice.prompt_token_ids + choice.token_ids]


def test_log_probabilities_of_named_tokens(client: OpenAI) -> None:
    wanted = [0, 17, 300]
    found = _complete(
        client, "The cat", logprob_token_ids=wanted, return_token_ids=True, return_tokens_as_token_ids=True
    )
    (choice,) = found.choices
    ids = choice.prompt_token_ids + choice.token_ids
    expected = scores(ids[:-1])[len(choice.prompt_token_ids) - 1 :]
    for token, row, listed in zip(choice.token_ids, expected, choice.logprobs.top_logprobs, strict=True):
        assert set(listed) == {f"token_id:{i}" for i in [token, *wanted]}
        for i in wanted:
            assert listed[f"token_id:{i}"] == pytest.approx(row[i].item(), abs=0.15)
    content = _chat(client, logprob_token_ids=wanted, logprobs=True).choices[0].logprobs.content
    assert all(len(entry.top_logprobs) >= len(wanted) for entry in content)


# --- prompts


@pytest.mark.parametrize("text", ["12 + 7 ", "12 + 7", "It is: "])
def test_a_message_is_continued(text: str, client: OpenAI) -> None:
    messages = [*SUM, {"role": "assistant", "content": text}]
    found = _chat(client, messages, continue_final_message=True, add_generation_prompt=False, return_token_ids=True)
    template = tokenizer().apply_chat_template(messages, continue_final_message=True, tokenize=False)
    assert found.prompt_token_ids == tokenizer()(template, add_special_tokens=False)["input_ids"]
    assert _chat(client, messages, continue_final_message=True).choices[0].message == found.choices[0].message


def test_the_answer_goes_on_and_echo_repeats(client: OpenAI) -> None:
    found = _chat(client, BEGUN, continue_final_message=True, echo=True).choices[0].message.content
    assert found.replace(" ", "").startswith("12+7=19")
    texts = [
        choice.delta.content or ""
        for chunk in _chat(client, BEGUN, continue_final_message=True, echo=True, stream=True)
        for choice in chunk.choices
    ]
    assert "".join(texts) == found
    assert _chat(client, SUM, echo=True).choices[0].message.content == "12 + 7 = 19."  # the user said the last one


def test_prompts_are_truncated(client: OpenAI) -> None:
    text = "one two three four five six seven eight nine ten"
    for side in ("left", "right"):
        tokenizer().truncation_side = side
        expected = tokenizer()(text, truncation=True, max_length=6)["input_ids"]
        found = _complete(client, text, truncate_prompt_tokens=6, truncation_side=side, return_token_ids=True)
        assert found.choices[0].prompt_token_ids == expected
    tokenizer().truncation_side = "right"
    ids = list(range(20, 60))
    found = _complete(client, ids, truncate_prompt_tokens=3, return_token_ids=True)
    assert found.choices[0].prompt_token_ids == ids[-3:]
    chat = _chat(client, truncate_prompt_tokens=5, return_token_ids=True)
    assert chat.prompt_token_ids == prompt_ids(SUM)[-5:]
    long = " word" * 3000  # far more than the context
    found = _complete(client, long, truncate_prompt_tokens=-1)
    assert found.usage.prompt_tokens + 8 == client.models.retrieve(MODEL).model_extra["max_model_len"]  # type: ignore[index]
    with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens is 9999999: there is room for"):
        _complete(client, long, truncate_prompt_tokens=9999999)


def test_special_tokens_of_prompts(client: OpenAI) -> None:
    for special in (False, True):
        found = _complete(client, "The cat", add_special_tokens=special, return_token_ids=True)
        expected = tokenizer()("The cat", add_special_tokens=special)["input_ids"]
        assert found.choices[0].prompt_token_ids == expected


def test_a_gap_is_not_filled_by_every_model(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="suffix is 'x': the model has no tokens for filling a gap"):
        _complete(client, "The cat", suffix="x")
    assert _complete(client, "The cat", suffix="").choices[0].text == _complete(client, "The cat").choices[0].text


def test_a_template_of_a_request_needs_trust(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="--trust-request-chat-template"):
        _chat(client, chat_template="{{ messages }}")


# --- output


def test_beams(client: OpenAI) -> None:
    """Against a search of three lines over transformers' log-probabilities."""
    prompt, width, steps = tokenizer()("The cat")["input_ids"], 3, 4
    beams: list[tuple[float, list[int]]] = [(0.0, prompt)]
    for _ in range(steps):
        grown = [(p + row[i].item(), [*ids, i]) for p, ids in beams for row in [scores(ids)[-1]]
                 for i in row.topk(2 * width).indices.tolist()]  # fmt: skip
        beams = sorted(grown, reverse=True)[:width]
    found = client.completions.create(
        model=MODEL, prompt="The cat", n=width, max_tokens=steps, logprobs=1,
        extra_body={"use_beam_search": True, "return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    assert {tuple(c.token_ids) for c in found.choices} == {tuple(ids[len(prompt) :]) for _, ids in beams}  # type: ignore[attr-defined]
    for choice, (total, _) in zip(found.choices, beams, strict=True):
        assert choice.logprobs is not None
        assert sum(choice.logprobs.token_logprobs or ()) == pytest.approx(total, abs=0.3)  # type: ignore[arg-type]
        assert choice.text == tokenizer().decode(choice.token_ids, skip_special_tokens=True)  # type: ignore[attr-defined]
    chat = _chat(client, STORY, use_beam_search=True, n=2)
    assert len({choice.message.content for choice in chat.choices}) == 2
    with pytest.raises(openai.BadRequestError, match="beam_width is 20"):
        _complete(client, "The cat", use_beam_search=True, n=20)


def test_older_names_of_structured_outputs(client: OpenAI, served: Served) -> None:
    assert _chat(client, guided_choice=["red", "blue"]).choices[0].message.content in ("red", "blue")
    assert _chat(client, guided_regex="[0-9]{3}").choices[0].message.content.isdigit()
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    assert '"a"' in _chat(client, guided_json=schema, guided_decoding_backend="auto").choices[0].message.content
    assert _complete(client, "x", guided_grammar='start: "yes"').choices[0].text == "yes"
    for _ in range(2):
        _chat(client, user="u", store=True)
    log = served.log.read_text()
    assert log.count("guided_choice of requests is deprecated: give structured_outputs.choice") == 1
    assert log.count("store of requests is ignored") == 1


@pytest.mark.parametrize("backend", ["guidance", "xgrammar", "outlines", "lm-format-enforcer"])
def test_a_backend_of_a_request(backend: str, client: OpenAI) -> None:
    """Beside the engine's own; a package that is missing, and what a backend cannot do, are the request's mistakes."""
    package = compiler_class(backend).package
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    wanted: Any = {"json": schema, "backend": backend, "disable_any_whitespace": True}
    if importlib.util.find_spec(package) is None:
        with pytest.raises(
            openai.BadRequestError, match=rf"{package} is not installed; run pip install 'graphllm\[{backend}"
        ):
            _chat(client, structured_outputs=wanted)
        return
    assert _chat(client, structured_outputs=wanted).choices[0].message.content in ('{"a":true}', '{"a":false}')
    with pytest.raises(openai.BadRequestError, match="not is not supported"):
        _chat(client, structured_outputs={"json": {"not": {"type": "null"}}, "backend": backend})
    if backend != "guidance":
        beyond = {"json": {"patternProperties": {"^a$": True}}, "backend": backend}
        with pytest.raises(openai.BadRequestError, match=f"patternProperties is not supported by {backend}; use the"):
            _chat(client, structured_outputs=beyond)


def test_chunks_of_several_tokens(client: OpenAI) -> None:
    def counts(**fields: Any) -> list[int]:
        stream = _complete(client, "Count:", stream=True, return_token_ids=True, ignore_eos=True, **fields)
        return [len(c.token_ids) for chunk in stream for c in chunk.choices]

    assert sum(counts()) == 8
    assert counts(stream_interval=3)[0] == 1
    assert all(count >= 3 for count in counts(stream_interval=3)[1:-1])
    assert len(counts(stream_interval=100)) == 2


def test_thinking_needs_tags(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="thinking_token_budget is 5: the model has no tokens <think>"):
        _chat(client, thinking_token_budget=5)


# --- ids


def test_ids_of_requests(client: OpenAI, served: Served) -> None:
    assert _chat(client, request_id="mine").id == "chatcmpl-mine"
    status, body, headers = served.post(
        "/v1/completions", {"prompt": "x", "max_tokens": 1, "request_id": "body"}, x_request_id="header"
    )
    assert (status, body["id"], headers["x-request-id"]) == (200, "cmpl-header", "header")
    assert served.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "request_id": "b"})[2]["x-request-id"] == "b"


def test_two_clients_with_one_id(served: Served) -> None:
    """Neither takes the other's answer, nor ends it by leaving."""

    async def both() -> tuple[str, str]:
        async with (
            AsyncOpenAI(base_url=f"{served.url}/v1", api_key="a", max_retries=0) as one,
            AsyncOpenAI(base_url=f"{served.url}/v1", api_key="b", max_retries=0) as other,
        ):
            body: Any = {"model": MODEL, "max_tokens": 200, "temperature": 0, "extra_headers": {"X-Request-Id": "same"}}
            extra = {"request_id": "same", "ignore_eos": True}
            left = await one.completions.create(prompt="Count:", stream=True, **body, extra_body=extra)
            asked = asyncio.create_task(other.completions.create(prompt="The cat", **body, extra_body=extra))
            async for _ in left:
                break
            await left.close()
            found = await asked
            again = await other.completions.create(prompt="The cat", **body, extra_body=extra)
            return found.choices[0].text, again.choices[0].text

    first, second = asyncio.run(both())
    assert first == second != ""
    served.idle()


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_many_ids_leave_nothing_behind(count: int, served: Served) -> None:
    def memory() -> int:
        status = open(f"/proc/{served.process.pid}/status").read()  # noqa: SIM115
        return int(status.split("VmRSS:")[1].split()[0]) << 10

    async def ask() -> None:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="a", max_retries=0, timeout=PATIENCE) as client:
            turns = asyncio.Semaphore(16)

            async def one(i: int) -> None:
                async with turns:
                    found = await client.completions.create(
                        model=MODEL, prompt="x", max_tokens=1, extra_body={"request_id": f"id-{time.time_ns()}-{i}"}
                    )
                    assert found.id.endswith(f"-{i}")

            await asyncio.gather(*map(one, range(count)))

    asyncio.run(ask())
    before = memory()
    asyncio.run(ask())
    assert memory() - before < 16 << 20
    assert not math.isnan(served.metric("graphllm_requests_running"))
    series = [line for line in served.get("/metrics")[1].splitlines() if "id-" in line]
    assert series == []


def test_fields_of_anthropic_and_responses(served: Served) -> None:
    body: dict[str, Any] = {"max_tokens": 16, "messages": [*SUM, {"role": "assistant", "content": "12 + 7 = "}]}
    status, found, _ = served.post("/v1/messages", {**body, "temperature": 0, "context_management": {"edits": []}})
    assert (status, found["content"][0]["text"].strip()) == (200, "19.")
    given = {"input": "What is 12 + 7?", "temperature": 0, "text": {"verbosity": "low"}, "max_tool_calls": 3,
             "request_id": "r", "service_tier": "auto", "store": False, "context_management": []}  # fmt: skip
    status, found, headers = served.post("/v1/responses", given)
    assert (status, headers["x-request-id"]) == (200, "r")
    assert found["output"][0]["content"][0]["text"] == "12 + 7 = 19."
