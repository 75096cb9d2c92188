"""Where texts begin and end, and what must not be in them, over a live server: inputs that failed when strangers tried
them. What is right is what the tokenizer makes of all tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.live import Served
from tests.server.sdk import tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EMOJI = "ok 🙂 日本"


def written(text: str, **fields: Any) -> dict[str, Any]:
    """A body of a chat in which the model writes this text."""
    return {"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"choice": [text]}, **fields}


def answer(served: Served, path: str, **fields: Any) -> Any:
    status, body, _ = served.post(path, {"model": "graphllm-embedded", "temperature": 0, **fields})
    assert status == 200, body
    return body["choices"][0]


def streamed(served: Served, path: str, **fields: Any) -> str:
    body = {"model": "graphllm-embedded", "temperature": 0, "stream": True, **fields}
    events = served.events(path, body)
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)


@pytest.mark.parametrize(
    "prompt", [[343, 2198, 289, 223, 1703, 250], "The sky is 🙂🙂"], ids=["ids", "cut on the right"]
)
def test_a_prompt_that_ends_within_a_character(served: Served, prompt: Any) -> None:
    cut = {} if isinstance(prompt, list) else {"truncate_prompt_tokens": 5, "truncation_side": "right"}
    fields = {"prompt": prompt, "max_tokens": 8, "return_token_ids": True, **cut}
    choice = answer(served, COMPLETIONS, **fields)
    known = tokenizer().decode(choice["prompt_token_ids"])
    assert known.endswith("\ufffd")
    whole = tokenizer().decode(choice["prompt_token_ids"] + choice["token_ids"], skip_special_tokens=True)
    text = whole[len(known) :] if whole.startswith(known) else whole[len(known.rstrip("\ufffd")) :]
    assert choice["text"] == text
    assert streamed(served, COMPLETIONS, **fields) == text
    assert answer(served, COMPLETIONS, **fields, stop=["never"])["text"] == text


@pytest.mark.parametrize("text", ["ok \ufffd", "\ufffd"])
def test_a_real_replacement_character_at_the_end(served: Served, text: str) -> None:
    body = written(text)
    assert answer(served, CHAT, **body)["message"]["content"] == text
    assert streamed(served, CHAT, **body) == text
    assert answer(served, CHAT, **body, stop=["never"])["message"]["content"] == text


def test_bytes_of_log_probabilities(served: Served) -> None:
    for body in (
        written(EMOJI, logprobs=True, top_logprobs=2),
        written(EMOJI, logprobs=True, return_tokens_as_token_ids=True),
    ):
        entries = answer(served, CHAT, **body)["logprobs"]["content"]
        end = bytes(entries[-1]["bytes"])
        assert (
            bytes(b for entry in entries[: -1 if end == b"<|endoftext|>" else None] for b in entry["bytes"])
            == EMOJI.encode()
        )


@pytest.mark.parametrize("prompt", ["What is é?", "héllo", "hello 🙂", "a", "日"])
def test_offsets_of_an_echoed_prompt(served: Served, prompt: str) -> None:
    """Each token stands where its first character does."""
    fields = {"prompt": prompt, "logprobs": 1, "echo": True, "max_tokens": 4, "return_token_ids": True}
    choice = answer(served, COMPLETIONS, **fields)
    ids, text = choice["prompt_token_ids"], choice["text"]
    whole = [*ids, *choice["token_ids"]]
    expected = [len(tokenizer().decode(whole[:i]).rstrip("\ufffd")) for i in range(len(whole))]
    logprobs = choice["logprobs"]
    assert logprobs["text_offset"] == expected
    assert text.startswith(prompt)
    assert logprobs["tokens"][0] == tokenizer().decode(ids[:1]).rstrip("\ufffd")
    for token, at in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert "\ufffd" in token or text.startswith(token, at) or token == "<|endoftext|>"


def test_a_special_token_as_a_stop_string(served: Served) -> None:
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    fields: dict[str, Any] = {"prompt": prompt, "ignore_eos": True, "max_tokens": 60, "logit_bias": {"1": 100}}
    choice = answer(served, COMPLETIONS, **fields, stop=["<|im_start|>"])
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", "<|im_start|>")


def test_no_stop_token_before_min_tokens(served: Served) -> None:
    """With a grammar, and where nothing else is allowed."""
    lines = "a\nb\nc\nd\ne\nf"
    body = written(lines, min_tokens=6, stop_token_ids=[201], return_token_ids=True)
    choice = answer(served, CHAT, **body)
    assert choice["token_ids"].count(201) > 1
    assert len(choice["token_ids"]) > 6
    assert choice["message"]["content"] == "a\nb\nc\nd"
    fields = {"prompt": "a", "allowed_token_ids": [201], "stop_token_ids": [201], "min_tokens": 6, "max_tokens": 20}
    assert answer(served, COMPLETIONS, **fields, return_token_ids=True)["token_ids"] == [201] * 7


@pytest.mark.parametrize("word", ["China", "capital", "Ch", "e", "\n", " of"])
def test_bad_words_are_nowhere(served: Served, word: str) -> None:
    """Not behind a space, not within longer tokens, not over several."""
    body = {"messages": [{"role": "user", "content": "Which country has the capital Beijing?"}], "bad_words": [word]}
    choice = answer(served, CHAT, **body, max_tokens=24)
    assert word not in choice["message"]["content"]
    assert choice["message"]["content"]


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        (
            COMPLETIONS,
            {"prompt": "x", "allowed_token_ids": [1321], "bad_words": ["Paris"]},
            ["allowed_token_ids", "bad_words"],
        ),
        (CHAT, written("P", bad_words=["P"]), ["structured_outputs", "bad_words"]),
        (CHAT, written("Paris", bad_words=["Paris"]), ["structured_outputs", "bad_words"]),
        (CHAT, written("Paris", allowed_token_ids=[5, 6]), ["structured_outputs", "allowed_token_ids"]),
    ],
)
def test_fields_that_leave_no_token(served: Served, path: str, fields: dict[str, Any], names: list[str]) -> None:
    assert tokenizer().decode([1321]) == "Paris"
    begun = {} if fields == written("Paris", bad_words=["Paris"]) else {"stream": True}  # which has its first letters
    for more in ({}, {"temperature": 1.0, "seed": 3}, begun):
        status, body, _ = served.post(
            path, {"model": "graphllm-embedded", "temperature": 0, "max_tokens": 8, **fields, **more}
        )
        assert status == 400, body
        assert all(name in body["error"]["message"] for name in names)
        assert "checkpoint" not in body["error"]["message"]
