"""Reading replies: what models write comes back as it was meant, however it is cut, in every format, in linear time."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphllm.embedded
from graphllm.chat.replies import (
    CallArguments,
    CallStart,
    ChatReply,
    Part,
    Reasoning,
    ReplyFormat,
    ReplyReader,
    Text,
    merged,
)
from graphllm.engine.requests.text import Tokenizer
from tests.tiers import draws, thorough

NAMES = frozenset({"f", "get_weather", "search-2"})
HERMES, LLAMA3, MISTRAL, JSON = (ReplyFormat(tools=t, names=NAMES) for t in ("hermes", "llama3", "mistral", "json"))
NAMED = ReplyFormat(tools="named", name="f")
PLAIN = ReplyFormat()
FORMATS = [
    f._replace(reasoning=reasoning, thinking=thinking)
    for f in (PLAIN, HERMES, LLAMA3, MISTRAL, JSON, NAMED)
    for reasoning, thinking in ((False, False), (True, False), (True, True))
]


def read(format: ReplyFormat, pieces: list[str] | str) -> list[Part]:
    """The parts of a text given in pieces, or character by character."""
    ids = itertools.count()
    reader = ReplyReader(format, lambda: f"id{next(ids)}")
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.finish()
    assert reader.called == any(isinstance(p, CallStart) for p in parts)
    return parts


def whole(parts: list[Part]) -> list[Part]:
    """Without the cuts between neighbours of a kind."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + part.text)
        elif isinstance(part, Text) and isinstance(last, Text):
            found[-1] = Text(last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments):
            assert part.index == last.index
            found[-1] = CallArguments(last.index, last.text + part.text)
        else:
            found.append(part)
    return found


def reply(format: ReplyFormat, text: str) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, text, and calls as names with arguments; the same for the text at once and by characters."""
    at_once, slowly = merged(read(format, [text])), merged(read(format, text))
    assert at_once == slowly
    return at_once.reasoning, at_once.text, [(call.name, json.loads(call.arguments)) for call in at_once.calls]


# --- invariants

FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>",
    "<", "</", "<t", "<|", "[", "]", "{", "}", ",", ";", ":", '"', "\\", "\\u", "\\ud83d", "\\ude00", "null", "f",
    "1", '"parameters": ', " ", "\n", "\n\n", "é😀", "word", '{"name": "f", ', '{"name": "f", "arguments": {',
    '"arguments":',
    '{"name": "other", "parameters": {}}', '{"name":"get_weather","parameters":{"a":"<"}}', '"name": "f"', '"id": 1',
    '{"name": "f", "arguments": "{\\"a\\": \\"\\\\n\\"}"}', '{"arguments": {"x": [1]}, "name": "f"}', 'f{"a": 1}',
]  # fmt: skip


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = "".join(draw(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=14)))
    places = sorted(draw(st.sets(st.integers(0, len(text)), max_size=12)))
    return text, [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f"{f.tools}-{f.reasoning}-{f.thinking}")
@settings(max_examples=draws(16, 50), deadline=None)
@given(cut=cut_texts())
def test_cuts_do_not_matter(format: ReplyFormat, cut: tuple[str, list[str]]) -> None:
    text, pieces = cut
    parts = read(format, [text])
    assert whole(read(format, pieces)) == whole(read(format, text)) == whole(parts)
    assert all(not isinstance(p, Text | Reasoning | CallArguments) or p.text for p in parts)
    starts = [p for p in parts if isinstance(p, CallStart)]
    assert [(s.index, s.id) for s in starts] == [(i, f"id{i}") for i in range(len(starts))]
    open_calls = itertools.accumulate((isinstance(p, CallStart) for p in parts), initial=0)
    assert all(p.index == n - 1 for p, n in zip(parts, open_calls, strict=False) if isinstance(p, CallArguments))
    if not format.reasoning and not starts:
        assert "".join(p.text for p in parts if isinstance(p, Text)) == text


@given(st.lists(st.sampled_from(FRAGMENTS) | st.text(min_size=1)))
def test_text_without_tools_passes_at_once(pieces: list[str]) -> None:
    reader = ReplyReader(PLAIN)
    for piece in pieces:
        assert reader.feed(piece) == [Text(piece)]
    assert reader.feed("") == reader.finish() == []


# --- calls as models write them

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
    | st.sampled_from(["</tool_call>", "<tool_call>{", "]", '"}', "\\", "[TOOL_CALLS]f{", "<think>", "</think>", "😀"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
ARGUMENTS = st.dictionaries(st.text(max_size=8), VALUES, max_size=4)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS), min_size=1, max_size=3)
WORDS = st.sampled_from(["", "Let me look.", "1 < 2 and [3] {x}\n- <b>bold</b>", "naïve 😀", "a\n\n b"])


@st.composite
def dumps(draw: st.DrawFn) -> Any:
    """A way of writing JSON."""
    options = {"ensure_ascii": draw(st.booleans()), "indent": draw(st.sampled_from([None, None, 2]))}
    return lambda value: json.dumps(value, **options)


def hermes(calls: Any, write: Any, key: str, early: bool) -> str:
    def call(name: str, arguments: Any) -> str:
        fields = {key: arguments, "name": name} if early else {"name": name, key: arguments}
        return f"<tool_call>\n{write(fields)}\n</tool_call>"

    return "\n".join(call(*c) for c in calls)


@settings(max_examples=draws(20, 60), deadline=None)
@given(WORDS, CALLS, dumps(), st.sampled_from(["arguments", "parameters"]), st.booleans(), WORDS)
def test_hermes_calls(before: str, calls: Any, write: Any, key: str, early: bool, after: str) -> None:
    text = hermes(calls, write, key, early)
    assert reply(HERMES, f"{before}\n{text}\n") == ("", before, calls)
    assert reply(HERMES, text + after) == ("", after, calls)
    assert reply(HERMES, text.removesuffix("</tool_call>")) == ("", "", calls)
    thought = f"<think>\n{before}\n</think>\n\n{text}"
    assert reply(HERMES._replace(reasoning=True), thought) == (before, "", calls)


@settings(max_examples=draws(20, 60), deadline=None)
@given(CALLS, dumps(), st.sampled_from(["; ", ";", "\n", "\n;\n"]), st.sampled_from(["", "<|python_tag|>", " \n"]))
def test_llama3_calls(calls: Any, write: Any, separator: str, before: str) -> None:
    text = separator.join(write({"name": name, "parameters": arguments}) for name, arguments in calls)
    assert reply(LLAMA3, before + text) == ("", "", calls)
    typed = separator.join(write({"type": "function", "name": n, "parameters": a}) for n, a in calls)
    assert reply(LLAMA3, before + typed) == ("", "", calls)
    tagged = ReplyFormat(tools="llama3")
    if before == "<|python_tag|>":  # then unknown functions are called, too
        assert reply(tagged, f"So: {before}{text}") == ("", "So:", calls)
    else:
        assert reply(tagged, before + text) == ("", before + text, [])


@settings(max_examples=draws(20, 60), deadline=None)
@given(WORDS, CALLS, dumps(), st.sampled_from(["", " ", "\n"]))
def test_mistral_calls(before: str, calls: Any, write: Any, space: str) -> None:
    array = write([{"name": name, "arguments": arguments, "id": "a1b2c3d4e"} for name, arguments in calls])
    assert reply(MISTRAL, f"{before}[TOOL_CALLS]{space}{array}") == ("", before, calls)
    for between in ("", "[ARGS]", "[CALL_ID]a1b2c3d4e[ARGS]"):
        text = space.join(f"[TOOL_CALLS]{name}{between}{write(arguments)}" for name, arguments in calls)
        assert reply(MISTRAL, before + text + space) == ("", before, calls)


@settings(max_examples=draws(20, 60), deadline=None)
@given(CALLS, dumps(), st.sampled_from(["", " ", "\n\n"]))
def test_json_calls(calls: Any, write: Any, space: str) -> None:
    array = write([{"name": name, "parameters": arguments} for name, arguments in calls])
    assert reply(JSON, space + array + space) == ("", "", calls)


@given(ARGUMENTS, dumps())
def test_named_call(arguments: Any, write: Any) -> None:
    text = write(arguments)
    assert merged(read(NAMED, text)) == ChatReply("", "", [("id0", "f", text)])
    assert read(NAMED, []) == []


@given(ARGUMENTS, dumps(), st.booleans())
def test_arguments_are_passed_as_written(arguments: Any, write: Any, early: bool) -> None:
    text = write(arguments)
    for value in (text, write(text)):  # the object, and a string that holds it
        fields = f'"arguments":  {value}, "name": "f"' if early else f'"name": "f", "arguments": {value} '
        [call] = merged(read(HERMES, f"<tool_call>{{{fields}}}</tool_call>")).calls
        assert call.arguments == text


def test_calls_as_a_chat_template_writes_them() -> None:
    """The model's own template, with the arguments as a client sends them back."""
    tokenizer = Tokenizer.from_folder(Path(graphllm.embedded.__file__).parent / "model")
    calls: list[tuple[str, Any]] = [("f", {"x": 1, "y": "é</tool_call>"}), ("get_weather", {"city": ['Pa"ris']})]
    message = {
        "role": "assistant",
        "content": "Both.",
        "tool_calls": [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls],
    }
    text = tokenizer.render_chat([message], add_generation_prompt=False)
    text = text.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")
    assert reply(HERMES, text) == ("", "Both.", calls)


# --- reasoning


@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [
        ("<think>\nhm\n</think>\n\n4", False, ("hm", "4")),
        (" \n<think>hm</think>4 \n", False, ("hm", "4 \n")),
        ("<think>\n\n</think>\n\n4", False, ("", "4")),
        ("hm\n</think>\n\n4", True, ("hm", "4")),
        ("\nhm </think>4", True, ("hm", "4")),
        ("<think>\nhm</think>4", True, ("hm", "4")),
        ("<think>a </thin </think> b </think> c", False, ("a </thin", "b </think> c")),
        ("<think>never closed \n", False, ("never closed \n", "")),
        ("never closed <tool_call>", True, ("never closed <tool_call>", "")),
        ("4 <think>hm</think>", False, ("", "4 <think>hm</think>")),
        (" \n4", False, ("", " \n4")),
        ("<thin", False, ("", "<thin")),
        ("<think>hm</think>", False, ("hm", "")),
        ("<think>", False, ("", "")),
        ("", True, ("", "")),
    ],
)
@pytest.mark.parametrize("tools", [None, "hermes", "llama3", "mistral"])
def test_reasoning(text: str, thinking: bool, expected: tuple[str, str], tools: str | None) -> None:
    format = ReplyFormat(reasoning=True, thinking=thinking, tools=tools)
    assert reply(format, text) == (*expected, [])


def test_reasoning_before_forced_calls() -> None:
    thought = "<think>\nhm\n</think>\n\n"
    for format, text in ((JSON, '[{"name": "f", "parameters": {"a": 1}}]'), (NAMED, '{"a": 1}')):
        assert reply(format._replace(reasoning=True), thought + text) == ("hm", "", [("f", {"a": 1})])


def test_whether_it_is_reasoning_now() -> None:
    reader = ReplyReader(ReplyFormat(reasoning=True))
    states = []
    for piece in ("<thi", "nk>", "hm", "\n</thin", "k>", "4"):
        reader.feed(piece)
        states.append(reader.reasoning)
    assert states == [False, True, True, True, False, False]
    assert ReplyReader(ReplyFormat(thinking=True)).reasoning


# --- what is no call


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "a <tool_call> b",
        "<tool_call>\n</tool_call>",
        "<tool_call>{}</tool_call>",
        "<tool_call>\n{'name': 'f', 'arguments': {}}\n</tool_call>",
        "<tool_call>{\"name\": 'f'}</tool_call>",
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 7}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "Paris"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "  ',
        '<tool_call>{"name": "f" "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}, "name',
        '<tool_call>{"arguments": "{\\"a\\": 1}"}',
        '<tool_call>{"id": , "name": "f", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f',
        '<tool_call>{"name": "f"',
        '<tool_call>{"name": "f\nline", "arguments": {}}</tool_call>',
        '<tool_call>{"na\\x": "f", "arguments": {}}</tool_call>',
        "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        "text <tool_cal",
        "text </tool_call>",
        "text \n",
    ],
)
def test_text_that_is_no_hermes_call(text: str) -> None:
    assert reply(HERMES, text) == ("", text, [])


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "other", "parameters": {}}',
        '{"name": "Anna", "age": 7}',
        '{"city": "Paris", "name": "f", "parameters": {}}',
        '{"name": "f", "parameters": 7}',
        '{"name": "f"',
        "{",
        "{}",
        'Call {"name": "f", "parameters": {}}',
        "<|python_tag|>print(1)",
        '<|python_tag|>search.call(query="x")',
        " \n",
    ],
)
def test_text_that_is_no_llama3_call(text: str) -> None:
    assert reply(LLAMA3, text) == ("", text, [])


@pytest.mark.parametrize(
    "text",
    ["[TOOL_CALLS]", "[TOOL_CALLS] none", "[TOOL_CALLS][]", "[TOOL_CALLS][1]", "[TOOL_CALLS]f[ARGS]7", "[TOOL_CALLS]{}",
     "[1] [TOOL", "[TOOL_CALLS]f[CALL_ID]x", "[TOOL_CALLS][ARGS]{}"],
)  # fmt: skip
def test_text_that_is_no_mistral_call(text: str) -> None:
    assert reply(MISTRAL, text) == ("", text, [])


@pytest.mark.parametrize("text", ["[]", "[", "7", "[{}]", '[{"name": "f", "parameters": 7}]', "no", " \n"])
def test_text_that_is_no_json_call(text: str) -> None:
    assert reply(JSON, text) == ("", text, [])


@pytest.mark.parametrize(
    ("format", "text", "rest"),
    [
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>', ""),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}}\n', ""),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>', ""),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}', ""),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}} so', " so"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}, "arguments": {}, "name": "g"}</tool_call>', ""),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}; so', "; so"),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"', ""),
        (HERMES, '<tool_call>{"id": [{"b": "]"}], "x": "y", "n": -1.5e3, "name": "f", "arguments": {"a": 1}}', ""),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> \n<tool_call>{', " \n<tool_call>{"),
        (HERMES, '<tool_call><tool_call>{"name": "\\u0066", "arguments": {"a": 1}}</tool_call>', "<tool_call>"),
        (LLAMA3, '{"name": "f", "parameters": {"a": 1}}; {"name": "other", "parameters": {}}',
         '; {"name": "other", "parameters": {}}'),
        (LLAMA3, '{"name": "f", "parameters": {"a": 1}}\nDone.', "\nDone."),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}', ""),
        (MISTRAL, '[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}} x', " x"),
        (MISTRAL, '[TOOL_CALLS]f{"a": 1}[TOOL', "[TOOL"),
        (JSON, '[{"name": "f", "parameters": {"a": 1}}, ', ""),
        (JSON, '[{"name": "f", "parameters": {"a": 1}}, {"na', ', {"na'),
        (JSON, '{"name": "f", "parameters": {"a": 1}}', ""),
    ],
)  # fmt: skip
def test_calls_with_mistakes(format: ReplyFormat, text: str, rest: str) -> None:
    assert reply(format, text) == ("", rest, [("f", {"a": 1})])


@pytest.mark.parametrize("value", ["null", '""', '" "', "{}", None])
def test_calls_without_arguments(value: str | None) -> None:
    fields = '{"name": "f"' + (f', "arguments": {value}}}' if value else "}")
    for format, text in (
        (HERMES, f"<tool_call>{fields}</tool_call>"),
        (LLAMA3, fields),
        (MISTRAL, f"[TOOL_CALLS][{fields}]"),
    ):
        assert reply(format, text) == ("", "", [("f", {})])


def test_arguments_that_are_cut_off() -> None:
    for text in (
        '<tool_call>{"name": "f", "arguments": {"a": "Par',
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"Par',
    ):
        assert merged(read(HERMES, text)) == ChatReply("", "", [("id0", "f", '{"a": "Par"}')])


CALLED = json.dumps({"a": 'P"\u00e9\n\U0001f600', "b": [12, True, {"c": None}], "d": -1.5})
WRITTEN_CALLS = {
    "hermes": (HERMES, 'So.\n<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>' * 2, "So."),
    "hermes, text": (HERMES, '<tool_call>{"name": "f", "arguments": %s}</tool_call>', ""),
    "llama3": (LLAMA3, '{"name": "f", "parameters": %s}; {"name": "f", "parameters": %s}', ""),
    "llama3, tag": (LLAMA3, 'So.<|python_tag|>{"name": "f", "parameters": %s}', "So."),
    "mistral": (MISTRAL, 'So.[TOOL_CALLS] [{"name": "f", "arguments": %s}, {"name": "f", "arguments": %s}]', "So."),
    "mistral, names": (MISTRAL, "[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]%s[TOOL_CALLS]f[ARGS]%s", ""),
    "required": (JSON, '[{"name": "f", "parameters": %s}, {"name": "f", "parameters": %s}]', ""),
    "named": (NAMED, "%s", ""),
    "reasoning": (HERMES._replace(reasoning=True),
                  '<think>\nhm\n</think>\n\n<tool_call>{"name": "f", "arguments": %s}</tool_call>', ""),
}  # fmt: skip


def part_of(some: Any, whole: Any) -> bool:
    """Whether JSON is the beginning of another one: fewer members, or less of the last one."""
    if isinstance(some, dict) and isinstance(whole, dict):
        return list(some) == list(whole)[: len(some)] and all(part_of(v, whole[k]) for k, v in some.items())
    if isinstance(some, list) and isinstance(whole, list):
        return all(map(part_of, some, whole)) and len(some) <= len(whole)
    return whole.startswith(some) if isinstance(some, str) else some == whole


@pytest.mark.parametrize("name", WRITTEN_CALLS)
@pytest.mark.parametrize("ascii", [True, False])
@pytest.mark.parametrize("quoted", [True, False])
def test_a_reply_that_is_cut_anywhere(name: str, ascii: bool, quoted: bool) -> None:
    """By max_tokens: text, calls whose arguments are JSON, and nothing of what is written around them."""
    format, pattern, _ = WRITTEN_CALLS[name]
    written = CALLED if ascii else json.dumps(json.loads(CALLED), ensure_ascii=False)
    within = json.dumps(written) if quoted and '": %s' in pattern else written
    text = pattern.replace("%s", within)
    most = 0
    for end in range(len(text) + 1):
        reader = ReplyReader(format)
        found = merged([*(part for c in text[:end] for part in reader.feed(c)), *reader.finish(cut=True)])
        assert "So.So.".startswith(found.text.replace("\n", "")) if "So." in pattern else not found.text
        assert "hm\n".startswith(found.reasoning)
        for call in found.calls:
            assert call.name == "f"
            assert part_of(json.loads(call.arguments), json.loads(CALLED))
        assert all(json.loads(call.arguments) == json.loads(CALLED) for call in found.calls[:-1])
        most = max(most, len(found.calls))
    assert most == pattern.count("%s")
    assert json.loads(found.calls[-1].arguments) == json.loads(CALLED)


@pytest.mark.parametrize("name", WRITTEN_CALLS)
def test_a_reply_of_one_call(name: str) -> None:
    """What comes behind its first call is not read, wherever the text ends."""
    format, pattern, before = WRITTEN_CALLS[name]
    text = pattern.replace("%s", CALLED)
    once = merged(read(format, text))
    for end in range(len(text) + 1):
        reader = ReplyReader(format._replace(single=True))
        parts = [part for c in text[:end] for part in reader.feed(c)]
        done = reader.done
        found = merged([*parts, *reader.finish()])
        assert len(found.calls) <= 1
        if done:
            assert (found.text, found.calls[0].arguments) == (before, once.calls[0].arguments)
    assert done or format.tools == "named"


@pytest.mark.parametrize(
    ("raw", "meant"),
    [
        (r"{\"a\": \"\u00e9\ud83d\ude00\"}", '{"a": "é😀"}'),
        (r"{\"a\": \"\\ud83d\"}", r'{"a": "\ud83d"}'),
        (r"{\"a\": \"\ud83d\ud83d\ude00\"}", '{"a": "\ufffd😀"}'),
        (r"{\q}", r"{\q}"),
    ],
)
def test_escapes_of_arguments_in_a_string(raw: str, meant: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": "{raw}"}}</tool_call>'
    for pieces in ([text], text):
        assert merged(read(HERMES, pieces)) == ChatReply("", "", [("id0", "f", meant)])


# --- streaming


def test_arguments_come_as_they_are_written() -> None:
    arguments = '{"a": ["}", "\\"{"], "b": {"c": "é"}}'
    for format, before in (
        (HERMES, '<tool_call>\n{"name": "f", "arguments": '),
        (LLAMA3, '{"name": "f", "parameters": '),
        (MISTRAL, "[TOOL_CALLS]f[ARGS]"),
        (JSON, '[{"name": "f", "parameters": '),
        (NAMED, ""),
    ):
        reader = ReplyReader(format)
        assert reader.feed(before) == []
        first = reader.feed(arguments[0])
        assert [type(part) for part in first] == [CallStart, CallArguments]
        shown = arguments[0]
        for count, c in enumerate(arguments[1:], 2):
            shown += "".join(part.text for part in reader.feed(c) if isinstance(part, CallArguments))
            assert arguments[:count].startswith(shown)
            assert count - len(shown) <= len(', "b": ')  # a name waits for its value, and no longer
        assert shown == arguments
        assert reader.finish() == []


def test_text_waits_for_no_more_than_a_tag() -> None:
    for format, tag in ((HERMES, "<tool_call>"), (MISTRAL, "[TOOL_CALLS]"), (LLAMA3, "<|python_tag|>")):
        reader, given_out = ReplyReader(format), ""
        text = f"Use {tag[:-1]}, or {tag[0]} and {tag[:3]}\n. " + "word " * 20
        for i, char in enumerate(text, 1):
            given_out += merged(reader.feed(char)).text
            held = text[len(given_out) : i]
            assert text.startswith(given_out)
            assert tag.startswith(held.lstrip())
    reader = ReplyReader(ReplyFormat(reasoning=True))
    assert reader.feed("<") == []
    assert reader.feed("b>") == [Text("<b>")]


def test_neighbours_come_as_one_part() -> None:
    text = "a < b < c <tool_call> d"
    assert ReplyReader(HERMES).feed(text) == [Text(text)]


def test_ids_are_random() -> None:
    text = '[{"name": "f", "parameters": {}}, {"name": "f", "parameters": {}}]'
    ids = [call.id for call in merged(ReplyReader(JSON).feed(text)).calls]
    assert len(set(ids)) == 2
    assert all(i.startswith("call_") and len(i) == 29 and int(i[5:], 16) for i in ids)


LONG = 200_000
_WORD = json.dumps({"a": ['x"\\'] * (LONG // 8)})
SLOW = {
    "text": (HERMES, "a " * (LONG // 2)),
    "space": (HERMES, " " * LONG),
    "angles": (HERMES, "<" * LONG),
    "tags": (HERMES, "<tool_call>" * (LONG // 11)),
    "arguments": (HERMES, '<tool_call>{"name":"f","arguments":' + _WORD),
    "arguments in a string": (HERMES, '<tool_call>{"name":"f","arguments":' + json.dumps(_WORD[: LONG // 2])),
    "arguments before the name": (HERMES, '<tool_call>{"arguments":' + _WORD),
    "a long name": (HERMES, '<tool_call>{"name":"' + "f" * LONG),
    "brackets": (HERMES, '<tool_call>{"name":"f","arguments":{}' + "}" * LONG),
    "calls": (LLAMA3, '{"name":"f","parameters":{}};' * (LONG // 28)),
    "an array": (JSON, "[" + '{"name":"f","parameters":{}},' * (LONG // 28)),
    "a prefix": (MISTRAL, "[TOOL_CALLS]" + "f" * LONG),
    "reasoning": (HERMES._replace(reasoning=True), "<think>" + "a < b </" * (LONG // 8)),
}


@pytest.mark.parametrize("name", [n if n in ("brackets", "a prefix") else thorough(n) for n in SLOW])
def test_time_is_linear(name: str) -> None:
    """In tokens of two characters, and at once. A linear reader takes 3 to 7 times as long as for a fourth of the text
    (in one of three tries, as one beside other work was 10.6), a quadratic one 16 times."""
    format, text = SLOW[name]

    def seconds(text: str) -> float:
        pieces = [text[i : i + 2] for i in range(0, len(text), 2)]
        begin = time.process_time()
        assert merged(read(format, pieces)) == merged(read(format, [text]))
        return time.process_time() - begin

    fourth = seconds(text[: len(text) // 4])
    assert any(seconds(text) < 10 * fourth for _ in range(3))
