"""What a model writes as a response of OpenAI's Responses API: the object as it stands, or the events of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from graphllm.chat.replies import CallArguments, CallStart, Ending, Part, Reasoning, Text, Usage
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.server.apis.responses.requests import Chat, is_object, messages_of

_PREFIX = {"message": "msg", "reasoning": "rs", "function_call": "fc"}  # of an item's id
_TEXT = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}  # of the events about an item's text
_ECHOED = (
    "instructions", "max_output_tokens", "previous_response_id", "prompt_cache_key", "prompt_cache_retention",
    "reasoning", "safety_identifier", "user",
)  # fmt: skip


def _echo(request: Mapping[str, Any], params: SamplingParams) -> dict[str, Any]:
    """What a response says about its request."""
    given = {name: value for name, value in request.items() if value is not None}
    tools = [{"description": None, "parameters": None, "strict": None, **tool} for tool in given.get("tools", [])]
    return {
        **{name: given.get(name) for name in _ECHOED},
        "background": given.get("background", False),
        "max_tool_calls": None,
        "metadata": given.get("metadata", {}),
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "service_tier": given.get("service_tier", "default"),
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}, **{n: v for n, v in given.get("text", {}).items() if v is not None}},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": tools,
        "top_logprobs": given.get("top_logprobs", 0),
        "top_p": params.top_p,
        "truncation": given.get("truncation", "disabled"),
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


def _part(kind: str, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """The only part of an item's content."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _streamed(logprobs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """As events about a text have them: without bytes."""
    kept = [{name: value for name, value in entry.items() if name != "bytes"} for entry in logprobs]
    return [e | {"top_logprobs": _streamed(e["top_logprobs"])} if "top_logprobs" in e else e for e in kept]


class ResponseWriter:
    """A response as it grows: call `start`, `parts` as often as there are some, and `end`; each gives events for a
    stream. `body` is the response as it stands. The parts of one call come in a row.

    created: Unix time in seconds. request: a body that `responses.to_chat` has taken. params: what it came to.
    """

    def __init__(self, id: str, created: int, model: str, request: Mapping[str, Any], params: SamplingParams) -> None:
        self._head = {"id": id, "object": "response", "created_at": created, "model": model, **_echo(request, params)}
        self._stem = id.removeprefix("resp_")
        self._status = "queued" if request.get("background") else "in_progress"
        self._error: dict[str, Any] | None = None
        self._incomplete: dict[str, Any] | None = None
        self._usage: Usage | None = None
        self._output: list[dict[str, Any]] = []  # items that are complete
        self._kind: str | None = None  # of the item that is not
        self._call = CallStart(0, "", "")  # of that, if it is one
        self._pieces: list[str] = []  # the text of that
        self._logprobs: list[dict[str, Any]] = []  # of its tokens
        self._pending: list[dict[str, Any]] = []  # of tokens with text that was not written yet
        self._sequence = 0

    def start(self) -> list[dict[str, Any]]:
        self._status = "in_progress"
        return [self._event(f"response.{name}", response=self.body()) for name in ("created", "in_progress")]

    def parts(self, parts: Iterable[Part], logprobs: Iterable[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        """logprobs: entries of the tokens of text that came with these parts, and maybe of calls after it."""
        listed = list(parts)
        self._pending += logprobs
        called = any(isinstance(part, CallStart) for part in listed)
        return [event for part in listed for event in self._write(part, called)]

    def _write(self, part: Part, called: bool) -> list[dict[str, Any]]:
        match part:
            case Text("") | Reasoning(""):
                return []
            case Text(text):
                return self._within("message") + self._delta(text, self._taken(len(text) if called else None))
            case Reasoning(text):
                return self._within("reasoning") + self._delta(text)
            case CallStart():
                closed = self._close("completed")
                self._call = part
                self._pending.clear()
                return closed + self._within("function_call")
            case CallArguments(_, text):
                return self._delta(text)

    def end(self, ending: Ending) -> list[dict[str, Any]]:
        """The last events."""
        reason = ending.finish_reason
        if self._kind == "message":
            self._logprobs += self._taken(None)
        closed = self._close("completed" if reason in ("stop", "tool_calls", "repetition") else "incomplete")
        self._usage = ending.usage
        if reason in ("error", "abort"):
            self._status = "failed"
            message = ending.error or "the request was stopped before its end"
            self._error = {"code": "server_error", "message": message}
        elif reason == "length":
            self._status, self._incomplete = "incomplete", {"reason": "max_output_tokens"}
        else:
            self._status = "completed"
        return [*closed, self._event(f"response.{self._status}", response=self.body())]

    def cancelled(self) -> None:
        """Somebody has cancelled the response; it stays as it is. There is no event for that."""
        self._close("incomplete")
        self._status = "cancelled"

    def body(self) -> dict[str, Any]:
        """The response as far as it is there."""
        grown = [] if self._kind is None else [self._item("in_progress", "".join(self._pieces))]
        return {
            **self._head,
            "status": self._status,
            "error": self._error,
            "incomplete_details": self._incomplete,
            "output": [*self._output, *grown],
            "usage": None if self._usage is None else _usage(self._usage),
        }

    def conversation(self) -> Chat:
        """What this adds to a chat, but for a call that broke off, or one that no template could show."""
        whole = [
            item
            for item in self._output
            if item["type"] != "function_call" or (item["status"] == "completed" and is_object(item["arguments"]))
        ]
        return messages_of(whole, "output")

    def _event(self, type: str, **fields: Any) -> dict[str, Any]:
        self._sequence += 1
        return {"type": type, "sequence_number": self._sequence - 1, **fields}

    def _id(self) -> str:
        return f"{_PREFIX[self._kind or '']}_{self._stem}_{len(self._output)}"

    def _about(self, type: str, **fields: Any) -> dict[str, Any]:
        """An event about the text of the item that grows."""
        place: dict[str, Any] = {"item_id": self._id(), "output_index": len(self._output)}
        if self._kind != "function_call":
            place["content_index"] = 0
        return self._event(type, **place, **fields)

    def _item(self, status: str, text: str | None) -> dict[str, Any]:
        """The item that grows. text: None when it has just begun and has no part."""
        item = {"id": self._id(), "type": self._kind, "status": status}
        if self._kind == "function_call":
            return {**item, "call_id": self._call.id, "name": self._call.name, "arguments": text or ""}
        content = [] if text is None else [_part(self._kind or "", text, self._logprobs)]
        if self._kind == "reasoning":
            return {**item, "summary": [], "content": content}
        return {**item, "role": "assistant", "content": content}

    def _within(self, kind: str) -> list[dict[str, Any]]:
        """Goes on in the item that grows if it is of this kind, begins one if not."""
        if self._kind == kind:
            return []
        events = self._close("completed")
        self._kind = kind
        events += [
            self._event(
                "response.output_item.added", output_index=len(self._output), item=self._item("in_progress", None)
            )
        ]
        if kind != "function_call":
            events += [self._about("response.content_part.added", part=_part(kind, ""))]
        return events

    def _taken(self, length: int | None) -> list[dict[str, Any]]:
        """The entries that wait. length: only the entries of this many characters."""
        count = 0
        while count < len(self._pending) and (length is None or length > 0):
            length = None if length is None else length - len(self._pending[count]["token"])
            count += 1
        taken, self._pending = self._pending[:count], self._pending[count:]
        return taken

    def _delta(self, text: str, entries: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        self._pieces.append(text)
        self._logprobs += entries
        logprobs: dict[str, Any] = {"logprobs": _streamed(entries)} if self._kind == "message" else {}
        return [self._about(f"{_TEXT[self._kind or '']}.delta", delta=text, **logprobs)]

    def _close(self, status: str) -> list[dict[str, Any]]:
        """Ends the item that grows, if there is one."""
        kind = self._kind
        if kind is None:
            return []
        text = "".join(self._pieces)
        whole: dict[str, dict[str, Any]] = {
            "message": {"text": text, "logprobs": _streamed(self._logprobs)},
            "reasoning": {"text": text},
            "function_call": {"name": self._call.name, "arguments": text},
        }
        events = [self._about(f"{_TEXT[kind]}.done", **whole[kind])]
        if kind != "function_call":
            events.append(self._about("response.content_part.done", part=_part(kind, text, self._logprobs)))
        item = self._item(status, text)
        events.append(self._event("response.output_item.done", output_index=len(self._output), item=item))
        self._output.append(item)
        self._kind, self._pieces, self._logprobs = None, [], []
        return events
