"""Calls that must be made, written as the model has learned to write them: `in_its_words`."""

from __future__ import annotations

import json
from typing import NamedTuple

from graphllm.chat.tools import MAX_CALLS, ToolUse, argument_schemas
from graphllm.config.requests.structured_outputs import CallGrammar, Piece
from graphllm.engine.requests.text import Tokenizer


class _Words(NamedTuple):
    """What stands around calls. before: a call's arguments, with the place of its name. start, end: around all."""

    before: str
    after: str
    between: str
    start: str = ""
    end: str = ""


_NAME = "NAME"
_OBJECT = '{"name": "NAME", "arguments": '
_WORDS = {
    "hermes": _Words(f"<tool_call>\n{_OBJECT}", "}\n</tool_call>", "\n"),
    "llama3": _Words('{"name": "NAME", "parameters": ', "}", "; "),
    "mistral": _Words(_OBJECT, "}", ", ", "[TOOL_CALLS][", "]"),
    "mistral with [ARGS]": _Words("[TOOL_CALLS]NAME[ARGS]", "", ""),
}
_MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]")  # tokens of their own, where the model has them


def in_its_words(use: ToolUse, format: str, tokenizer: Tokenizer) -> CallGrammar:
    """The grammar of a reply where a choice forces a call. format: one of `replies`. Raises ConfigError for a schema
    that cannot be enforced."""
    if format == "mistral" and "[ARGS]" in tokenizer.chat_template:
        format = "mistral with [ARGS]"
    words = _WORDS[format]

    def pieces(text: str) -> tuple[Piece, ...]:
        return _pieces(text, tokenizer)

    calls = tuple(
        (pieces(words.before.replace(_NAME, name)), json.dumps(schema), pieces(words.after))
        for name, schema in argument_schemas(use)
    )
    most = MAX_CALLS if use.parallel and use.choice == "required" else 1
    return CallGrammar(pieces(words.start), calls, pieces(words.between), pieces(words.end), most)


def _pieces(text: str, tokenizer: Tokenizer) -> tuple[Piece, ...]:
    """A text, with the ids of marks that are tokens of this model in their places."""
    for mark in _MARKS:
        before, found, after = text.partition(mark)
        ids = tokenizer.encode(mark, add_special_tokens=False) if found else []
        if len(ids) == 1 and tokenizer.decode(ids, skip_special_tokens=False) == mark:  # else it is the unknown token
            return (*_pieces(before, tokenizer), ids[0], *_pieces(after, tokenizer))
    return (text,) if text else ()
