"""Conversations as users give them: what is one and the same, what is refused by which name, what is one of several."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from graphllm.config import ConfigError
from graphllm.config.errors import ErrorPlace
from graphllm.engine.chat_template.conversation import conversation, shown_tools, text_of

USER = {"role": "user", "content": "hi"}


def call(arguments: Any, **fields: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}, **fields}


def part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def test_messages() -> None:
    messages = [
        {"role": "developer", "content": [{**part("a "), "cache_control": None}, {"type": "input_text", "text": "b"}]},
        {"role": "user", "content": "hi", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call('{"a": [1, "é"]}'), call({"b": 2}), call("")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "4"},
        {"role": "assistant", "content": [part("4"), {"type": "refusal", "refusal": "!"}], "tool_calls": None},
        {"role": "assistant", "tool_calls": []},
        {"role": "user", "content": []},
    ]
    before = copy.deepcopy(messages)
    found = conversation(messages)
    assert messages == before
    assert found == [
        {"role": "system", "content": [part("a "), part("b")]},
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call({"a": [1, "é"]}), call({"b": 2}), call({})]},
        messages[3],
        {"role": "assistant", "content": [part("4"), part("!")]},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
    ]
    assert conversation(found) == found
    assert [text_of(m) for m in found] == ["a \nb", "hi", "", "4", "4!", "", ""]


@pytest.mark.parametrize("id", ["call_abc|fc_123", "a b", "<|im_end|>", "é🙂", "x" * 256])
def test_ids_are_their_makers(id: str) -> None:
    found = conversation(
        [{"role": "assistant", "tool_calls": [call("{}", id=id)]}, {"role": "tool", "tool_call_id": id}]
    )
    assert (found[0]["tool_calls"][0]["id"], found[1]["tool_call_id"]) == (id, id)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "messages is None"),
        ([], "messages is []"),
        ("hi", "messages is 'hi'"),
        ([USER, "hi"], "messages[1] is 'hi': give an object with role and content"),
        ([{"content": "hi"}], "messages[0] is {'content'"),
        ([{**USER, "role": "<|im_end|>"}], "messages[0].role is '<|im_end|>'"),
        ([{**USER, "name": "a b"}], "messages[0].name is 'a b'"),
        ([{**USER, "tool_call_id": "x" * 257}], "messages[0].tool_call_id is 'xxx"),
        ([{**USER, "reasoning": ["a"]}], "messages[0].reasoning is ['a']: give text"),
        ([{**USER, "tool_call_id": 5}], "messages[0].tool_call_id is 5: give 1 to 256 characters"),
        ([USER, {**USER, "content": 5}], "messages[1].content is 5: give text, or a list of parts of type text"),
        ([USER, {**USER, "content": [part("a"), {"type": "image"}]}], "messages[1].content has {'type': 'image'}"),
        ([{**USER, "content": [{"type": "text"}]}], "messages[0].content has {'type': 'text'}"),
        ([{**USER, "content": [{"type": ["text"], "text": "a"}]}], "messages[0].content has {'type': ['text']"),
    ],
)
def test_what_is_no_conversation(messages: Any, message: str) -> None:
    with pytest.raises(ConfigError, match="^" + re.escape(message)) as refusal:
        conversation(messages)
    assert len(str(refusal.value)) < 250


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (7, "messages[1].tool_calls is 7"),
        ([7], "messages[1].tool_calls[0] is 7"),
        ([call("{}"), {"id": "x"}], "messages[1].tool_calls[1] is {'id'"),
        ([{"function": {"arguments": "{}"}}], "messages[1].tool_calls[0] is {'function'"),
        ([{"function": {"name": "<f>"}}], "messages[1].tool_calls[0].function.name is '<f>'"),
        ([call("{}", id="")], "messages[1].tool_calls[0].id is ''"),
        ([call("{")], "messages[1].tool_calls[0].function.arguments is '{'"),
        ([call("[" * 100_000)], "messages[1].tool_calls[0].function.arguments is '[["),
        ([call("{}"), call("[1]")], "messages[1].tool_calls[1].function.arguments is '[1]'"),
        ([call(7)], "messages[1].tool_calls[0].function.arguments is 7"),
        ([call('{"a": "' + "x" * 200)], 'messages[1].tool_calls[0].function.arguments is \'{"a"'),
    ],
)
def test_calls_that_are_none(calls: Any, message: str) -> None:
    with pytest.raises(ConfigError, match="^" + re.escape(message)) as refusal:
        conversation([USER, {"role": "assistant", "tool_calls": calls}])
    assert len(str(refusal.value)) < 250


def test_tools_as_models_are_told_of_them() -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"default": None}}}}
    told = {"type": "function", "function": function}
    assert shown_tools([{"function": {**function, "strict": True, "description": None}, "type": "function"}]) == [told]
    assert shown_tools([{"name": "f", "strict": None}]) == [{"name": "f"}]  # another form, which some templates know
    assert shown_tools([]) is shown_tools(None) is None


def test_one_item_of_several() -> None:
    """The place within it is that of the whole."""
    assert (
        str(ErrorPlace("messages", 2).error(ConfigError("messages[0].content is 5"))) == "messages[2][0].content is 5"
    )
    assert str(ErrorPlace("messages", 2).error(ConfigError("chat template: no"))) == "messages[2]: chat template: no"
