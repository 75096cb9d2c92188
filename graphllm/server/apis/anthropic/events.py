"""What a model writes as a message of Anthropic's Messages API: at once, or as the events of a stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic_core import from_json

from graphllm.chat.error_bodies import anthropic_error_body
from graphllm.chat.replies import CallArguments, CallStart, Ending, Part, Reasoning, Text, Usage


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


def _input(arguments: str) -> dict[str, Any]:
    """What a tool is called with. Of JSON that breaks off, at max_tokens, what is complete, as Anthropic's clients read
    it from a stream; text that is no JSON of an object stands whole under "_raw"."""
    try:
        found = from_json(arguments, allow_partial=True, allow_inf_nan=False) if arguments.strip() else {}
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"_raw": arguments}


class MessageWriter:
    """A message as it grows: call `start`, `parts` as often as there are some, and `end`; each gives events for a
    stream. `body` is the message itself. The parts of one call come in a row.

    omit_thinking: say that there is thinking and not what.
    """

    def __init__(self, id: str, model: str, omit_thinking: bool = False) -> None:
        self._message = {"id": id, "type": "message", "role": "assistant", "model": model, "content": []}
        self._ended: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._usage = Usage(0, 0)
        self._omit = omit_thinking
        self._content: list[dict[str, Any]] = []  # blocks that are complete
        self._block: dict[str, Any] | None = None  # the one that is not
        self._pieces: list[str] = []  # the text of that
        self._called = False

    def start(self, usage: Usage) -> list[dict[str, Any]]:
        """usage: what is known of it before there is output."""
        self._usage = usage
        return [{"type": "message_start", "message": self.body()}]

    def parts(self, parts: Iterable[Part]) -> list[dict[str, Any]]:
        return [event for part in parts for event in self._part(part)]

    def _part(self, part: Part) -> list[dict[str, Any]]:
        match part:
            case Text("") | Reasoning(""):
                return []
            case Text(text):
                return self._within({"type": "text", "text": ""}) + self._delta("text_delta", "text", text)
            case Reasoning(text):
                opened = self._within({"type": "thinking", "thinking": "", "signature": ""})
                return opened if self._omit else opened + self._delta("thinking_delta", "thinking", text)
            case CallStart(_, id, name):
                self._called = True
                return self._open({"type": "tool_use", "id": id, "name": name, "input": {}})
            case CallArguments(_, text):
                return self._delta("input_json_delta", "partial_json", text)

    def _within(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        """Goes on in the open block if it is of this type, begins this one if not."""
        return [] if self._block is not None and self._block["type"] == block["type"] else self._open(block)

    def _open(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        closed = self._close()
        self._block = block
        return [*closed, {"type": "content_block_start", "index": len(self._content), "content_block": block}]

    def _delta(self, kind: str, name: str, text: str) -> list[dict[str, Any]]:
        self._pieces.append(text)
        delta = {"type": kind, name: text}
        return [{"type": "content_block_delta", "index": len(self._content), "delta": delta}]

    def _close(self) -> list[dict[str, Any]]:
        if self._block is None:
            return []
        # Nothing is signed here, but clients take the thinking as complete only with a signature.
        signed = self._delta("signature_delta", "signature", "") if self._block["type"] == "thinking" else []
        stop = {"type": "content_block_stop", "index": len(self._content)}
        self._content.append(self._filled(self._block))
        self._block, self._pieces = None, []
        return [*signed, stop]

    def _filled(self, block: dict[str, Any]) -> dict[str, Any]:
        text = "".join(self._pieces)
        if block["type"] == "tool_use":
            return {**block, "input": _input(text)}
        return {**block, block["type"]: text}

    def end(self, ending: Ending) -> list[dict[str, Any]]:
        """The last events. What went wrong is an event too, and then the message stays without an end."""
        if ending.finish_reason in ("error", "abort"):
            return [anthropic_error_body(500, ending.error or "the request was stopped before its end")]
        closed = self._close()
        self._usage = ending.usage
        stop = ending.stop_reason if ending.finish_reason in ("stop", "half_call") else None
        if ending.finish_reason == "length":
            self._ended["stop_reason"] = "max_tokens"
        elif self._called and ending.finish_reason != "half_call":
            self._ended["stop_reason"] = "tool_use"
        elif isinstance(stop, str):
            self._ended = {"stop_reason": "stop_sequence", "stop_sequence": stop}
        else:
            self._ended["stop_reason"] = "end_turn"
        delta = {"type": "message_delta", "delta": dict(self._ended), "usage": _usage(self._usage)}
        return [*closed, delta, {"type": "message_stop"}]

    def body(self) -> dict[str, Any]:
        """The message as far as it is there."""
        grown = [] if self._block is None else [self._filled(self._block)]
        return {**self._message, "content": [*self._content, *grown], **self._ended, "usage": _usage(self._usage)}
