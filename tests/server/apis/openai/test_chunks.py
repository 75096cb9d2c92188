"""Streams of OpenAI's API: however an answer is cut, its chunks are as OpenAI's client wants them and add up to it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, count
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from graphllm.chat.answers import ChunkWriter, response_body
from graphllm.chat.call import CHAT, COMPLETIONS, Call, Style, parse_call, write_out
from graphllm.chat.replies import ReplyFormat
from graphllm.config.requests.sampling_params import RequestOutputKind, SamplingParams
from graphllm.engine.requests.outputs import OutputProcessor, RequestOutput
from graphllm.engine.requests.processor import Processor
from graphllm.engine.requests.request import EngineCoreOutput, EngineRequest, PositionLogprobs
from graphllm.engine.requests.text import Tokenizer
from tests.engine import byte_tokenizer
from tests.engine.stub_core import info

OPEN = SamplingParams(max_tokens=None)
HELLO = [{"role": "user", "content": "hello"}]
ABOUT = ("17", "served", 1234)
STEPWISE, AT_ONCE = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY

WORDS = st.text(st.sampled_from("abü🙂, \n"), max_size=12)
PLAIN = WORDS.map(str.strip)
ARGUMENTS = st.dictionaries(st.sampled_from("ab"), WORDS | st.integers(0, 99) | st.none(), max_size=2)


class Said(NamedTuple):
    """What a completion says. ended: by an end-of-sequence token. sizes: tokens of its updates, the rest comes at once.
    late: steps after the completion before it."""

    text: str
    ended: bool
    sizes: Sequence[int]
    late: int


def said(texts: st.SearchStrategy[str], ended: st.SearchStrategy[bool]) -> st.SearchStrategy[Said]:
    return st.builds(Said, texts, ended, st.lists(st.integers(1, 5), max_size=20), st.integers(0, 3))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer.make(tmp_path_factory.mktemp("tokenizer"))


def _outputs(
    call: Call, answers: Sequence[Said], kind: RequestOutputKind, tokenizer: Tokenizer
) -> list[tuple[int, RequestOutput]]:
    """With the numbers of their prompts. answers: of all completions, in their order."""
    processor, outputs = Processor(tokenizer, info(400, max_model_len=4096, capacity=8192)), OutputProcessor(tokenizer)
    params = replace(call.params, output_kind=kind)
    requests: list[EngineRequest] = []
    for number, prompt in enumerate(write_out(call, tokenizer, Style())[1]):
        parsed = processor.make(prompt, params, str(number))
        outputs.add(parsed)
        requests += parsed.requests
    steps: dict[int, list[EngineCoreOutput]] = {}
    for request, answer, begin in zip(requests, answers, accumulate(a.late for a in answers), strict=True):
        for step, update in zip(count(begin), _updates(request, answer, tokenizer)):
            steps.setdefault(step, []).append(update)
    found = [output for _, updates in sorted(steps.items()) for output in outputs.process(updates).outputs]
    assert not outputs.unfinished
    return [(int(output.request_id), output) for output in found]


def _updates(request: EngineRequest, answer: Said, tokenizer: Tokenizer) -> Iterator[EngineCoreOutput]:
    params, prompt = request.params, request.prompt
    tokens = tokenizer.encode(answer.text) + [byte_tokenizer.EOS] * answer.ended or [byte_tokenizer.END]
    places = list(accumulate(answer.sizes, initial=0))
    for i, begin in enumerate(places):
        end = places[i + 1] if i + 1 < len(places) else len(tokens)
        update = EngineCoreOutput(request.id, tokens[begin:end])
        if params.logprobs is not None:
            update.logprobs = [_ranked(token, params.logprobs) for token in update.tokens]
        if not i:
            update.cached = len(prompt) // 2
            if params.prompt_logprobs is not None:
                update.prompt_logprobs = [_ranked(token, params.prompt_logprobs) for token in prompt[1:]]
        if end >= len(tokens):
            update.finish_reason = "stop" if tokens[-1] < 3 else "length"
            yield update
            return
        yield update


def _ranked(token: int, top: int) -> PositionLogprobs:
    return PositionLogprobs(token, -3.5 - token, top + 1, [(token + i) % 300 for i in range(1, top + 1)], [-0.25] * top)


def _chunks(call: Call, answers: Sequence[Said], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """As they arrive."""
    writer = ChunkWriter(call, *ABOUT, lambda text: len(tokenizer.encode(text)))
    written = [writer.write(*news) for news in _outputs(call, answers, STEPWISE, tokenizer)]
    return json.loads(json.dumps([chunk for chunks in written for chunk in chunks] + writer.last()))


def _whole(call: Call, answers: Sequence[Said], tokenizer: Tokenizer) -> Any:
    found = dict(_outputs(call, answers, AT_ONCE, tokenizer))
    outputs = [found[i] for i in range(len(found))]
    return json.loads(json.dumps(response_body(call, outputs, *ABOUT, lambda text: len(tokenizer.encode(text)))))


# --- chats

HERMES = ReplyFormat(reasoning=True, tools="hermes", names=frozenset({"add", "now"}))


class Reply(NamedTuple):
    """Of a model that thinks and calls tools."""

    reasoning: str
    text: str
    calls: list[tuple[str, dict[str, Any]]]

    def written(self) -> str:
        calls = [json.dumps({"name": name, "arguments": given}, ensure_ascii=False) for name, given in self.calls]
        thought = f"<think>{self.reasoning}</think>" if self.reasoning else ""
        return thought + self.text + "".join(f"<tool_call>{call}</tool_call>" for call in calls)


REPLIES = st.builds(Reply, PLAIN, PLAIN, st.lists(st.tuples(st.sampled_from(["add", "now"]), ARGUMENTS), max_size=2))


@settings(deadline=None)
@given(data=st.data(), n=st.integers(1, 3), top=st.none() | st.integers(0, 2), shown=st.booleans())
def test_a_chat(data: st.DataObject, n: int, top: int | None, shown: bool, tokenizer: Tokenizer) -> None:
    replies = data.draw(st.lists(REPLIES, min_size=n, max_size=n))
    answers = [data.draw(said(st.just(reply.written()), st.just(True))) for reply in replies]
    fields = {} if top is None else {"logprobs": True, "top_logprobs": top}
    call = _chat(n=n, stream_options={"include_usage": True}, include_reasoning=shown, **fields)
    chunks = [ChatCompletionChunk.model_validate(c, strict=True) for c in _chunks(call, answers, tokenizer)]
    assert {(c.id, c.object, c.created, c.model) for c in chunks} == {
        ("chatcmpl-17", "chat.completion.chunk", 1234, "m")
    }
    whole = ChatCompletion.model_validate(_whole(call, answers, tokenizer), strict=True)
    folded = _folded(chunks)
    assert folded.usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    thoughts = sum(len(tokenizer.encode(reply.reasoning)) for reply in replies)
    assert whole.usage.completion_tokens_details.reasoning_tokens == thoughts
    for reply, choice, grown in zip(replies, whole.choices, folded.choices, strict=True):
        for found in (choice, grown):
            assert (found.message.content or "") == reply.text
            thought = reply.reasoning if shown else ""
            extra = found.message.model_extra or {}
            assert (extra.get("reasoning_content", ""), extra.get("reasoning", "")) == (thought, thought)
            made = [(c.function.name, json.loads(c.function.arguments)) for c in found.message.tool_calls or []]
            assert made == reply.calls
            assert len({c.id for c in found.message.tool_calls or []}) == len(reply.calls)
            assert found.finish_reason == ("tool_calls" if reply.calls else "stop")
        assert grown.logprobs == choice.logprobs
        if top is not None:
            assert choice.logprobs is not None
            tokens = [*tokenizer.encode(reply.written()), byte_tokenizer.EOS]
            assert [t.logprob for t in choice.logprobs.content or []] == [-3.5 - token for token in tokens]


@settings(deadline=None)
@given(text=st.text(st.sampled_from('<>think/tool_cal{}":a '), max_size=30), data=st.data(), tools=st.booleans())
def test_a_chat_of_anything(text: str, data: st.DataObject, tools: bool, tokenizer: Tokenizer) -> None:
    """Replies that break off anywhere."""
    text = (
        data.draw(st.sampled_from(["", "<think>", "<tool_call>", '<tool_call>{"name": "add", "arguments": {'])) + text
    )
    answer = data.draw(said(st.just(text), st.booleans()))
    call = _chat()._replace(reply=HERMES if tools else ReplyFormat())
    chunks = [ChatCompletionChunk.model_validate(c, strict=True) for c in _chunks(call, [answer], tokenizer)]
    (grown,), (choice,) = _folded(chunks).choices, ChatCompletion(**_whole(call, [answer], tokenizer)).choices
    assert (grown.message.content or "") == (choice.message.content or "")
    assert tools or choice.message.content == text
    assert (grown.message.model_extra or {}).get("reasoning") == (choice.message.model_extra or {}).get("reasoning")
    calls, expected = ([c.function for c in m.tool_calls or []] for m in (grown.message, choice.message))
    assert [(c.name, c.arguments) for c in calls] == [(c.name, c.arguments) for c in expected]
    assert grown.finish_reason == choice.finish_reason
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)


def _chat(**fields: Any) -> Call:
    body = {"model": "m", "messages": HELLO, "stream": True, **fields}
    return parse_call(CHAT, body, OPEN)._replace(reply=HERMES)


def _folded(chunks: Sequence[ChatCompletionChunk]) -> Any:
    """As the client's own helper puts them together."""
    state = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(chunk)
    return state.current_completion_snapshot


def test_the_order_of_a_chat(tokenizer: Tokenizer) -> None:
    """The role first, the end last, then the usage, which is null or a running count before."""
    answer = Said("hello cat", True, [1] * 20, 0)
    chunks = _chunks(_chat(stream_options={"include_usage": True}), [answer], tokenizer)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"] == [] for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert [c["usage"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    running = _chat(stream_options={"include_usage": True, "continuous_usage_stats": True})
    counted = [c["usage"] for c in _chunks(running, [answer], tokenizer)]
    assert counted[-1] == chunks[-1]["usage"]
    tokens = [usage["completion_tokens"] for usage in counted]
    assert tokens == sorted(tokens)
    assert tokens[0] == 1
    assert "usage" not in _chunks(_chat(), [answer], tokenizer)[-1]


# --- completions


@settings(deadline=None)
@given(
    data=st.data(),
    prompts=st.lists(PLAIN.filter(bool), min_size=1, max_size=2),
    n=st.integers(1, 2),
    echo=st.booleans(),
    top=st.none() | st.integers(0, 2),
    scored=st.booleans(),
    alone=st.booleans(),
    stop=st.sampled_from([[], ["ab"], ["b,", "aaa"]]),
)
def test_a_completion(
    data: st.DataObject, prompts: list[str], n: int, echo: bool, top: int | None, scored: bool, alone: bool,
    stop: list[str], tokenizer: Tokenizer,
) -> None:  # fmt: skip
    answers = data.draw(st.lists(said(WORDS, st.booleans()), min_size=len(prompts) * n, max_size=len(prompts) * n))
    fields: dict[str, Any] = {"stop": stop, "logprobs": top, "prompt_logprobs": 1 if scored else None}
    if echo and alone:
        fields["max_tokens"] = 0
    body = {"model": "m", "prompt": prompts, "n": n, "echo": echo, "stream": True, "temperature": 1.0, **fields}
    call = parse_call(COMPLETIONS, {**body, "stream_options": {"include_usage": True}}, OPEN)
    if call.echo_only:
        answers = [answer._replace(text="a", ended=False) for answer in answers]
    chunks = _chunks(call, answers, tokenizer)
    whole = _whole(call, answers, tokenizer)
    assert chunks[-1]["usage"] == whole["usage"]
    for chunk in chunks:
        Completion.model_validate(_without_unknown(chunk), strict=True)
        assert (chunk["id"], chunk["object"], chunk["created"], chunk["model"]) == (
            "cmpl-17", "text_completion", 1234, "m",
        )  # fmt: skip
    for choice, answer in zip(whole["choices"], answers, strict=True):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        text = "".join(c["text"] for c in parts)
        prompt = prompts[choice["index"] // n]
        behind = "" if call.echo_only else _until(answer.text, stop)
        assert text == choice["text"] == (prompt + behind if echo else behind)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert parts[-1]["stop_reason"] == choice["stop_reason"]
        assert choice["stop_reason"] in ([None, *stop] if behind != answer.text else [None])
        assert all(c["finish_reason"] is None for c in parts[:-1])
        told = [c["logprobs"] for c in parts if c["logprobs"] is not None]
        if top is None:
            assert told == []
            assert choice["logprobs"] is None
        else:
            assert {name: [v for logprobs in told for v in logprobs[name]] for name in choice["logprobs"]} == (
                choice["logprobs"]
            )
            assert all(len(values) == len(choice["logprobs"]["tokens"]) for values in choice["logprobs"].values())
        scores = [c["prompt_logprobs"] for c in parts if "prompt_logprobs" in c]
        assert scores == ([choice["prompt_logprobs"]] if "prompt_logprobs" in choice else [])
        assert ("prompt_logprobs" in choice) == (call.params.prompt_logprobs is not None)


def _until(text: str, stop: Sequence[str]) -> str:
    """Before the first stop string that is complete."""
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    return text[: min(ends)[1]] if ends else text


def _without_unknown(chunk: dict[str, Any]) -> dict[str, Any]:
    """What the client's types, which are those of whole answers, do not tell: null, for what is not known yet."""
    known = json.loads(json.dumps(chunk))
    for choice in known["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        for name in ("token_logprobs", "top_logprobs") if choice["logprobs"] else ():
            choice["logprobs"][name] = [v for v in choice["logprobs"][name] if v is not None]
    return known


def test_prompt_logprobs_of_a_chat_come_once(tokenizer: Tokenizer) -> None:
    call, answer = _chat(prompt_logprobs=1), Said("hello", True, [1] * 9, 0)
    found = [c["prompt_logprobs"] for c in _chunks(call, [answer], tokenizer) if "prompt_logprobs" in c]
    assert found == [_whole(call, [answer], tokenizer)["prompt_logprobs"]]
    assert len(found[0]) == len(tokenizer.encode("<s>user:hello;bot:"))
