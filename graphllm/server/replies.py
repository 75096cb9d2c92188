"""What a model's text means in a chat: reasoning, an answer, tool calls. Read as it comes, in pieces of any size."""

from __future__ import annotations

from typing import NamedTuple


class Reasoning(NamedTuple):
    """A piece of the thinking before the answer."""

    text: str


class Text(NamedTuple):
    """A piece of the answer."""

    text: str


class CallStart(NamedTuple):
    """A tool call begins. index: 0 for the first one of this reply."""

    index: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """The next piece of the JSON that a tool call passes."""

    index: int
    text: str


Part = Reasoning | Text | CallStart | CallArguments


class Usage(NamedTuple):
    """Tokens. cached: of the prompt, found in the prefix cache. reasoning: of the completion."""

    prompt: int
    completion: int
    cached: int = 0
    reasoning: int = 0


class Ending(NamedTuple):
    """finish_reason: "stop", "length", "tool_calls", "abort" or "error". stop_reason: the stop string or token id that
    ended it. error: what went wrong, for people."""

    finish_reason: str
    usage: Usage
    stop_reason: int | str | None = None
    error: str | None = None
