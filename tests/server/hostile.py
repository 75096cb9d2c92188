"""Requests that nobody should send: valid bodies with something wrong in them, and constraints that are hard to
compile."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import reduce
from typing import Any

from hypothesis import strategies as st

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
POSTS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, f"{MESSAGES}/count_tokens", "/tokenize", "/detokenize")
_LENGTHS = {CHAT: "max_tokens", COMPLETIONS: "max_tokens", RESPONSES: "max_output_tokens"}
_MOST = 4  # of tokens and completions


def shorten(path: str, body: Any) -> Any:
    """The same request, as far as what is wrong with it goes, for a few tokens."""
    if isinstance(body, dict):
        if body.get(name := _LENGTHS.get(path, "max_tokens")) is None and path in _LENGTHS:
            body[name] = _MOST
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n"):
            if type(body.get(name)) is int and 2**63 > body[name] > _MOST:
                body[name] = _MOST
    return body


# --- valid bodies, of all kinds

_USER = {"role": "user", "content": "What is 12 + 7?"}
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0}, "b": {"enum": ["x", "y"]}, "c": {"$ref": "#/$defs/c"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"c": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]+$"}, "maxItems": 3}},
}
_FUNCTION = {"name": "add", "description": "Adds.", "parameters": _SCHEMA, "strict": True}
_TOOLS = {"tools": [{"type": "function", "function": _FUNCTION}], "parallel_tool_calls": False}
_CALLS = [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
_SAMPLED = {
    "n": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": 3, "stop": ["\n\n", "zz"],
    "stop_token_ids": [7], "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1,
    "logit_bias": {"15": 2.5}, "bad_words": ["never"], "min_tokens": 1, "ignore_eos": True, "cache_salt": "salt",
}  # fmt: skip
_TEXTS = {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}
_INPUT = [
    {"role": "user", "content": [{"type": "input_text", "text": "Add."}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "3"},
]
_TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "Add.", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "3", "is_error": False}]},
]
_TOOL = {"name": "add", "description": "Adds.", "input_schema": _SCHEMA}
VALID: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"messages": [{"role": "system", "content": "Be brief."}, _USER], **_SAMPLED}),
    (CHAT, {"messages": [_USER], "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1}),
    (CHAT, {"messages": [_USER], "stream": True, "stream_options": {"include_usage": True}, **_TOOLS}),
    (CHAT, {"messages": [_USER], "tool_choice": "required", **_TOOLS}),
    (CHAT, {"messages": [_USER, {"role": "assistant", "content": None, "tool_calls": _CALLS},
                         {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "3"}]}]}),
    (CHAT, {"messages": [_USER], "response_format": _TEXTS, "chat_template_kwargs": {"x": [1, {"y": None}]}}),
    (COMPLETIONS, {"prompt": "Count: 1", "echo": True, "logprobs": 1, **_SAMPLED}),
    (COMPLETIONS, {"prompt": [[5, 6], [7]], "stream": True, "structured_outputs": {"regex": "[0-9]{2}(a|b)*"}}),
    (COMPLETIONS, {"prompt": ["a", "b"], "structured_outputs": {"grammar": 'start: "a" b+\nb: /[0-9]/ | "c"'}}),
    (RESPONSES, {"input": _INPUT, "instructions": "Be brief.", "tools": [{"type": "function", **_FUNCTION}]}),
    (RESPONSES, {"input": "Hi", "stream": True, "text": {"format": {"type": "json_object"}}, "metadata": {"a": "b"}}),
    (MESSAGES, {"messages": _TURNS, "max_tokens": 3, "system": "Be brief.", "tools": [_TOOL],
                "tool_choice": {"type": "any"}, "thinking": {"type": "disabled"}}),
    (MESSAGES, {"messages": [_USER], "max_tokens": 3, "stream": True, "stop_sequences": ["x"], "top_k": 5}),
    (f"{MESSAGES}/count_tokens", {"messages": _TURNS, "tools": [_TOOL]}),
    ("/tokenize", {"messages": [_USER], "add_generation_prompt": True, **_TOOLS}),
    ("/tokenize", {"prompt": "Hello", "add_special_tokens": False, "return_token_strs": True}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
)  # fmt: skip


# --- what goes wrong with them


def nested(depth: int, inner: Any = None, key: str = "") -> Any:
    """Lists in lists, or with a key objects in objects."""
    return reduce(lambda value, _: {key: value} if key else [value], range(depth), inner)


_SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.text(max_size=8), st.floats(allow_nan=True),
    st.sampled_from([2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**30, -(10**400)]),
    st.sampled_from(["", " ", "\0", "\ud800", "\udc00x", "\ufeff", "\u202e", "e\u0301" * 40, "\U0001f3f3\u200d"]),
    st.sampled_from(["<|im_end|>", "<tool_call>", "{{ 7*7 }}", "%s%n{}", "1e999", "-1", "self"]),
    st.sampled_from(["9" * 5000, "x" * 20_000, "\n" * 5000]),
)  # fmt: skip
_KEYWORDS = (
    "type", "properties", "items", "$ref", "enum", "const", "anyOf", "allOf", "oneOf", "pattern", "minimum", "required",
    "format", "maxLength", "multipleOf", "prefixItems", "additionalProperties", "patternProperties", "not", "if", "$id",
)  # fmt: skip
_NAMES = st.one_of(
    st.sampled_from([*_KEYWORDS, "role", "content", "name", "strict", "self", "model"]), st.text(max_size=5)
)
_WORDS = st.sampled_from(
    ["object", "string", "array", "number", "#", "#/$defs/c", "#/properties/a", "^(a|b)*$", "date"]
)
_VALUES = st.recursive(
    _SCALARS | _WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3),
    max_leaves=6,
)
_DEEP = st.builds(nested, st.sampled_from([20, 97, 126, 130, 700]), _SCALARS, st.sampled_from(["", "items", "not"]))
_ROLES = st.sampled_from(["system", "developer", "tool", "function", "assistant", "User", "ipython", "\u0455ystem"])


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value, with every key of it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path, and one of the valid bodies with one to three mistakes."""
    path, body = draw(st.sampled_from(VALID))
    whole = {"body": copy.deepcopy(body)}
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(whole)) or [(whole, "body")]
        container, key = draw(st.sampled_from(places))
        match draw(st.sampled_from(["replace", "deep", "role", "delete", "add", "swap"])):
            case "delete" if key in container or isinstance(container, list):
                del container[key]
            case "add" if isinstance(container, dict):
                container[draw(_NAMES)] = draw(_VALUES)
            case "add":
                container.insert(key, draw(_VALUES))
            case "swap":  # a value that is right somewhere else
                other, place = draw(st.sampled_from(places))
                if isinstance(other, dict) and place in other:
                    container[key] = copy.deepcopy(other[place])
            case "role" if key in ("role", "type"):
                container[key] = draw(_ROLES)
            case "deep":
                container[key] = draw(_DEEP)
            case _:
                container[key] = draw(_VALUES)
    return path, json.dumps(shorten(path, whole.get("body"))).encode()


# --- constraints that once took for ever, or the whole process


def _chain(count: int, schema: Any) -> dict[str, Any]:
    """Definitions of which each refers to the next: ``schema`` makes one from that reference."""
    definitions = {f"d{i}": schema({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{count}": {"type": "string"}}}


def _rules(count: int, last: str) -> str:
    return "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(count)) + f"\nr{count}: {last}"


HARD: dict[str, dict[str, Any]] = {
    "chain of properties": {"json": _chain(950, lambda next: {"type": "object", "properties": {"x": next}})},
    "chain of nested items": {"json": _chain(40, lambda next: nested(60, next, "items"))},
    "chain that is too long": {"json": _chain(3000, lambda next: {"allOf": [next, {"minLength": 1}]})},
    "chain of rules": {"grammar": _rules(9000, '"a"')},
    "chain of terminals": {"grammar": _rules(9000, '"a"').replace("r", "R").replace("staRt", "start")},
    "empty lines": {"grammar": "\n" * 190_000},
    "open brackets": {"grammar": "a[\n" * 60_000},
    "error behind empty lines": {"grammar": 'start: "a" %%%' + "\n" * 190_000 + "x"},
    "flags": {"regex": "(?" + "u" * 190_000},
    "optional letters": {"regex": "a?" * 90_000},
    "intersection": {"grammar": "start: A\nA: " + " & ".join(f"/(.*{c}.{{9}})*/" for c in "abcdefgh")},
    "patterns of names": {
        "json": {"type": "object", "patternProperties": {f"^a.{{{i}}}$": {"type": "string"} for i in range(999)}}
    },
    "pointer": {"json": {"anyOf": [{"$ref": "#/anyOf/" + "9" * 9000}]}},
    "many options": {"json": {"oneOf": [{"const": f"v{i}"} for i in range(9000)]}},
    "many names": {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}},
    "open groups": {"grammar": "root ::= " + "(" * 90_000},
    "deep groups": {"regex": "(" * 60_000 + "a" + ")" * 60_000},
    "large counts": {"regex": "((a{1,1000}b){1,1000}c){1,1000}"},
}


# --- bodies of which reading, checking and tokenizing make many times their bytes


def large_bodies(size: int) -> dict[str, tuple[str, bytes]]:
    """Paths and bodies of about ``size`` bytes, by what is in them."""

    def filled(path: str, before: str, item: str, after: str) -> tuple[str, bytes]:
        """item: what is repeated, with what stands between two."""
        count = (size - len(before) - len(after)) // len(item.encode())
        return path, (before + (item * count).rstrip(",") + after).encode()

    user, keys = '{"messages": [{"role": "user", "content": "', range(size // 15)
    return {
        "words": filled(COMPLETIONS, '{"prompt": "', "hello world, some words ", '"}'),
        "spaces": filled(COMPLETIONS, '{"prompt": "', " ", '"}'),
        "one letter": filled(CHAT, user, "a", '"}]}'),
        "escapes": filled(CHAT, user, "\\u00e9", '"}]}'),
        "brackets in a text": filled(CHAT, user, "[{", '"}]}'),
        "emoji": filled(RESPONSES, '{"input": "', "\U0001f3f3", '"}'),
        "text to count": filled("/tokenize", '{"prompt": "', "hello ", '"}'),
        "messages to count": filled(f"{MESSAGES}/count_tokens", user, "hello ", '"}]}'),
        "messages": filled(CHAT, '{"messages": [', '{"role":"user","content":""},', "]}"),
        "parts": filled(CHAT, '{"messages": [{"role": "user", "content": [', '{"type":"text","text":""},', "]}]}"),
        "turns": filled(MESSAGES, '{"max_tokens": 2, "messages": [', '{"role":"user","content":"x"},', "]}"),
        "items": filled(RESPONSES, '{"input": [', '{"role":"user","content":"x"},', "]}"),
        "empty lists": filled(CHAT, '{"messages": [', "[],", "]}"),
        "empty objects": filled(CHAT, '{"messages": [', "{},", "]}"),
        "prompts": filled(COMPLETIONS, '{"prompt": [', '"ab",', "]}"),
        "token ids": filled(COMPLETIONS, '{"prompt": [', "999,", "]}"),
        "floats": filled(COMPLETIONS, '{"prompt": [', "1.5,", "]}"),
        "ids to decode": filled("/detokenize", '{"tokens": [', "999,", "]}"),
        "bad words": filled(COMPLETIONS, '{"prompt": "x", "bad_words": [', '"ab",', "]}"),
        "stop strings": filled(COMPLETIONS, '{"prompt": "x", "stop": [', '"ab",', "]}"),
        "stop ids": filled(COMPLETIONS, '{"prompt": "x", "stop_token_ids": [', "999,", "]}"),
        "allowed ids": filled(COMPLETIONS, '{"prompt": "x", "allowed_token_ids": [', "999,", "]}"),
        "fields": (COMPLETIONS, json.dumps({f"f{i}": i for i in range(size // 20)}).encode()),
        "bias": (COMPLETIONS, json.dumps({"prompt": "x", "logit_bias": dict.fromkeys(map(str, keys), 1)}).encode()),
        "metadata": (CHAT, json.dumps({"messages": [], "metadata": dict.fromkeys(map(str, keys), "")}).encode()),
        "a tool": filled(CHAT, '{"tools": [{"type": "function", "function": {"name": "f", "description": "', "hello ",
                         '"}}], "messages": [{"role": "user", "content": "x"}]}'),
        "a schema": filled(CHAT, '{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": '
                           '"json_schema", "json_schema": {"name": "n", "schema": {"enum": [', '"ab",', "]}}}}"),
    }  # fmt: skip
