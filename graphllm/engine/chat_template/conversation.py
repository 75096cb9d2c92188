"""A conversation as users give it, a list of message dicts, is checked here and made the same for every way into the
engine. What one chat template wants otherwise than another is in `graphllm.engine.chat_template.template`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from graphllm.config import ConfigError

_ROLE = re.compile(r"[a-zA-Z][a-zA-Z0-9_-]{0,31}")  # some templates know others than OpenAI's
_LABEL = re.compile(r"[^\s<>|\[\]{}]{1,256}")
_LONGEST_ID = 256
REASONING = ("reasoning_content", "thinking", "reasoning")  # names that templates and clients use for the same field
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # field of a part's text
_RESERVED = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "render",
        "chat_template",
        "continue_final_message",
        "content_format",
    }
)


def conversation(given: object) -> list[dict[str, Any]]:
    """The messages of a conversation, checked.

    Fields that are null are gone, and the others have one order. "developer" is the newer name of the role "system".
    Content is text, or a list of parts {"type": "text", "text": ...}; where there is none it is "". Arguments of calls
    are objects. Raises ConfigError that names the place.
    """
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise ConfigError(f"messages is {given!r:.80}: give at least one message")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(given)]


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a checked message. Each part is a line; parts of an assistant's message are pieces of one answer."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return ("" if message.get("role") == "assistant" else "\n").join(part["text"] for part in content)


def shown_tools(tools: Iterable[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools as models read them, without fields that mean nothing to a model (null, strict); None without tools."""
    return [_shown(tool) for tool in tools or ()] or None


def check_template_kwargs(kwargs: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError for variables that a conversation itself sets."""
    reserved = sorted(kwargs.keys() & _RESERVED)
    if reserved:
        raise ConfigError(f"{where} has {reserved[0]!r}: it cannot be set there; leave it out")


def check_label(value: object, where: str) -> None:
    """Check a name that a chat template writes as it stands: it may have nothing of a template's marks. Raises
    ConfigError."""
    if not isinstance(value, str) or not _LABEL.fullmatch(value):
        raise ConfigError(
            f"{where} is {value!r:.80}: give 1 to 256 characters without spaces, <, >, |, [, ], {{ and }}"
        )


def _shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    given = _without_null(tool)
    function = given.pop("function", None)
    if not isinstance(function, Mapping):
        return _without_null(tool)
    shown = {name: value for name, value in function.items() if value is not None and name != "strict"}
    return {"type": given.pop("type", "function"), "function": shown, **given}


def _without_null(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ConfigError(f"{where} is {message!r:.80}: give an object with role and content")
    # Templates write it as it stands, so one that looks like a template's own mark would be taken for it.
    if not _ROLE.fullmatch(message["role"]):
        raise ConfigError(f"{where}.role is {message['role']!r:.80}: give system, user, assistant or tool")
    found = _without_null(message)
    if "name" in found:
        check_label(found["name"], f"{where}.name")
    if "tool_call_id" in found:
        _check_id(found["tool_call_id"], f"{where}.tool_call_id")
    for name in REASONING:
        if not isinstance(found.get(name, ""), str):
            raise ConfigError(f"{where}.{name} is {found[name]!r:.80}: give text")
    role = found.pop("role")
    content = _content(found.pop("content", ""), f"{where}.content")
    found = {"role": "system" if role == "developer" else role, "content": content, **found}
    calls = found.pop("tool_calls", [])
    if not isinstance(calls, list):
        raise ConfigError(f"{where}.tool_calls is {calls!r:.80}: give a list of calls")
    if calls:
        found["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return found


def _content(content: object, where: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ConfigError(f"{where} is {content!r:.80}: give text, or a list of parts of type text")
    return [{"type": "text", "text": _text(part, where)} for part in content] or ""


def _text(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get(_TEXTS[kind]) if isinstance(part, Mapping) and isinstance(kind, str) and kind in _TEXTS else None
    if not isinstance(text, str):
        raise ConfigError(f"{where} has {part!r:.80}: not supported; give parts of type text")
    return text


def _call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(f"{where} is {call!r:.80}: give an object with id, type and function (name, arguments)")
    check_label(function["name"], f"{where}.function.name")
    found = _without_null(call)
    if "id" in found:
        _check_id(found["id"], f"{where}.id")
    given = function.get("arguments") or "{}"  # some clients leave them empty
    arguments = _object(given) if isinstance(given, str) else given
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"{where}.function.arguments is {given!r:.80}: give a JSON object as text")
    # In one order: some templates write a call as JSON.
    first: dict[str, Any] = {name: found.pop(name) for name in ("id", "type") if name in found}
    return {**first, **found, "function": {"name": function["name"], **function, "arguments": arguments}}


def _check_id(id: object, where: str) -> None:
    """Ids are their maker's: any text will do."""
    if not isinstance(id, str) or not 0 < len(id) <= _LONGEST_ID:
        raise ConfigError(f"{where} is {id!r:.80}: give 1 to {_LONGEST_ID} characters")


def _object(text: str) -> Any:
    """What a JSON text says; None when it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
