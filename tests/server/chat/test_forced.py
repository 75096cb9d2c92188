"""Calls that must be made are written as the model's family writes calls, and are valid by jsonschema's judgement."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from jsonschema import Draft202012Validator

from graphllm.chat.call import CHAT, Style, parse_call, write_out
from graphllm.chat.forced import in_its_words
from graphllm.chat.replies import ReplyFormat, ReplyReader, merged
from graphllm.chat.tools import check_tools
from graphllm.config.requests.sampling_params import SamplingParams, StructuredOutputsParams
from graphllm.embedded import MODEL_DIR
from graphllm.engine.requests.text import Tokenizer
from graphllm.engine.structured.backends.llguidance import GrammarCompiler
from tests.server.live import Served
from tests.server.sdk import BOTH, CITY, FUNCTIONS, MODEL, TOOLS, WEATHER, prompt_ids
from tests.server.sdk import tokenizer as reference_tokenizer

STOP = 2
NAMES = frozenset(function["name"] for function in FUNCTIONS)
PARIS = [("get_weather", {"city": "Paris"})]
# As the families' own chat templates write these calls in a history.
CALLS = {
    "hermes": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        '\n<tool_call>\n{"name": "get_time", "arguments": {"city": "Rome"}}\n</tool_call>',
    ),
    "llama3": (
        '{"name": "get_weather", "parameters": {"city": "Paris"}}',
        '; {"name": "get_time", "parameters": {"city": "Rome"}}',
    ),
    "mistral": (
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}',
        ', {"name": "get_time", "arguments": {"city": "Rome"}}',
    ),
    "mistral with [ARGS]": (
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}',
        '[TOOL_CALLS]get_time[ARGS]{"city": "Rome"}',
    ),
}


def of(family: str, folder: Path) -> Tokenizer:
    """The embedded tokenizer with Mistral's marks as special tokens. The newer ones are told by the template."""
    shutil.copytree(MODEL_DIR, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    backend = tokenizers.Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    backend.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
    backend.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = "[TOOL_CALLS][ARGS]" if "ARGS" in family else "[TOOL_CALLS]"
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize("family", CALLS)
def test_a_family_writes_its_own_way(family: str, tmp_path: Path) -> None:
    """And no other: neither plain JSON, nor arguments that are wrong, nor a special token in letters."""
    tokenizer = of(family, tmp_path)
    compiler = GrammarCompiler(tmp_path, tokenizer.vocab_size, frozenset([STOP]))
    end = "]" if family == "mistral" else ""

    def ids(text: str) -> list[int]:
        return [*tokenizer.encode(text, add_special_tokens=False), STOP]

    def allows(tokens: list[int], choice: Any, parallel: bool = True) -> bool:
        calls = in_its_words(check_tools(TOOLS, choice, parallel), family.split()[0], tokenizer)
        return compiler.compile(StructuredOutputsParams(calls=calls)).matcher().validate(tokens) == len(tokens)

    first, second = CALLS[family]
    named = {"type": "function", "function": {"name": "get_weather"}}
    assert allows(ids(first + end), "required")
    assert allows(ids(first + end), named)
    assert not allows(ids(first.replace("get_weather", "get_time") + end), named)
    assert allows(ids(first + second + end), "required")
    assert not allows(ids(first + second + end), "required", parallel=False)
    assert not allows(ids(first + second + end), named)
    for other in (first.replace('"Paris"', "7"), first.replace("city", "town"), first.replace("get_", "set_")):
        assert not allows(ids(other + end), "required")
    assert not allows(ids('[{"name": "get_weather", "parameters": {"city": "Paris"}}]'), "required")
    if "mistral" in family:
        mark = tokenizer.encode("[TOOL_CALLS]", add_special_tokens=False)
        letters = [i for char in "[TOOL_CALLS]" for i in tokenizer.encode(char, add_special_tokens=False)]
        rest = ids((first + end).removeprefix("[TOOL_CALLS]"))
        assert allows([*mark, *rest], "required")
        assert not allows([*letters, *rest], "required")
    reader = ReplyReader(ReplyFormat(tools=family.split()[0], names=NAMES))
    reply = merged([*reader.feed(first + second + end), *reader.finish()])
    found = [(call.name, json.loads(call.arguments)) for call in reply.calls]
    assert (reply.text, found) == ("", [*PARIS, ("get_time", {"city": "Rome"})])


def test_marks_that_are_special_tokens_are_seen(tmp_path: Path) -> None:
    """By who reads the reply; other models' texts stay without special tokens."""
    shutil.copytree(MODEL_DIR, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    backend = tokenizers.Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    backend.add_special_tokens(["<tool_call>", "</tool_call>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    body = {"messages": WEATHER, "tools": TOOLS, "tool_choice": "required"}
    for folder, hidden in ((tmp_path, False), (MODEL_DIR, True)):
        call, _ = write_out(parse_call(CHAT, body, SamplingParams()), Tokenizer.from_folder(folder), Style("hermes"))
        assert call.params.skip_special_tokens == hidden


def test_whatever_is_written_is_a_valid_call(tmp_path: Path) -> None:
    """A model that chooses among the allowed tokens at random."""
    schema = {
        "type": "object",
        "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "array", "items": {"type": "boolean"}}},
        "required": ["unit", "days"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("f", "g")]
    tokenizer = of("hermes", tmp_path)
    compiler = GrammarCompiler(tmp_path, tokenizer.vocab_size, frozenset([STOP]))
    calls = in_its_words(check_tools(tools, "required", True), "hermes", tokenizer)
    grammar, random, made = compiler.compile(StructuredOutputsParams(calls=calls)), np.random.default_rng(0), 0
    row = np.empty((tokenizer.vocab_size + 31) // 32, np.int32)
    for _ in range(20):
        matcher, ids = grammar.matcher(), list[int]()
        while not matcher.finished and len(ids) < 400:
            matcher.allow(row)
            ids.append(int(random.choice(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")))))
            matcher.advance(ids[-1])
        if not matcher.finished:
            continue
        reader = ReplyReader(ReplyFormat(tools="hermes"))
        text = tokenizer.decode(ids[:-1], skip_special_tokens=False)
        reply = merged([*reader.feed(text), *reader.finish()])
        assert reply.text == ""
        assert len(reply.calls) == text.count("<tool_call>\n{") == text.count("}\n</tool_call>") > 0
        for call in reply.calls:
            Draft202012Validator(schema).validate(json.loads(call.arguments))
            assert call.name in ("f", "g")
        made += 1
    assert made >= 10


def test_the_text_is_what_the_template_writes(served: Served) -> None:
    """So that the next turn finds the whole of it in the prefix cache."""
    for choice, parallel in (
        ("required", True),
        ("required", False),
        (TOOLS[0] | {"function": {"name": "get_weather"}}, True),
    ):
        body = {"model": MODEL, "messages": WEATHER, "tools": TOOLS, "tool_choice": choice, "temperature": 0}
        status, answer, _ = served.post(
            "/v1/chat/completions", {**body, "parallel_tool_calls": parallel, "return_token_ids": True}
        )
        assert status == 200, answer
        message = answer["choices"][0]["message"]
        (call,) = message["tool_calls"]
        Draft202012Validator(CITY).validate(json.loads(call["function"]["arguments"]))
        history = [*WEATHER, {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}]
        whole = reference_tokenizer().apply_chat_template(history, tools=TOOLS)["input_ids"]
        made = prompt_ids(WEATHER, tools=TOOLS) + answer["choices"][0]["token_ids"]
        assert whole[: len(made)] == made
        assert not message["content"]


def test_all_apis_give_the_same_calls(served: Served) -> None:
    """Whole and streamed."""
    functions: Any = [{"type": "function", **function} for function in FUNCTIONS]
    plain: Any = [{"name": f["name"], "description": f["description"], "input_schema": CITY} for f in FUNCTIONS]
    bodies = {
        "/v1/chat/completions": {"messages": BOTH, "tools": TOOLS, "tool_choice": "required"},
        "/v1/responses": {"input": BOTH[0]["content"], "tools": functions, "tool_choice": "required"},
        "/v1/messages": {"messages": BOTH, "tools": plain, "tool_choice": {"type": "any"}, "max_tokens": 200},
    }
    found: list[Any] = []
    for path, body in bodies.items():
        status, answer, _ = served.post(path, {"model": MODEL, "temperature": 0, **body})
        assert status == 200, answer
        streamed = served.events(path, {"model": MODEL, "temperature": 0, "stream": True, **body})
        if path == "/v1/chat/completions":
            calls = [call["function"] for call in answer["choices"][0]["message"]["tool_calls"]]
            found.append([(call["name"], json.loads(call["arguments"])) for call in calls])
            parts = [
                part for event in streamed for c in event["choices"] for part in c["delta"].get("tool_calls") or ()
            ]
            names = [part["function"]["name"] for part in parts if part["function"].get("name")]
            texts = [
                "".join(p["function"].get("arguments") or "" for p in parts if p["index"] == i)
                for i in range(len(names))
            ]
            found.append([(name, json.loads(text)) for name, text in zip(names, texts, strict=True)])
        elif path == "/v1/responses":
            for items in (answer["output"], streamed[-1]["response"]["output"]):
                found.append([(item["name"], json.loads(item["arguments"])) for item in items])
        else:
            found.append([(block["name"], block["input"]) for block in answer["content"]])
            names = [e["content_block"]["name"] for e in streamed if e["type"] == "content_block_start"]
            deltas = [e for e in streamed if e["type"] == "content_block_delta"]
            texts = ["".join(e["delta"]["partial_json"] for e in deltas if e["index"] == i) for i in range(len(names))]
            found.append([(name, json.loads(text)) for name, text in zip(names, texts, strict=True)])
    assert found == [[("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})]] * 6
