"""Requests of Anthropic's Messages API become bodies of OpenAI's chat; `graphllm.server.apis.anthropic.events` is the
way back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import Field

from graphllm.chat.fields import judged
from graphllm.config import ConfigError
from graphllm.engine.chat_template.conversation import text_of
from graphllm.server.http.bodies import Items, Object, choice, fields, objects, optional, refuse_unless, required

NEUTRAL: dict[str, Any] = {"speed": "standard"}
_SAME = ("model", "temperature", "top_p", "top_k", "stream", "cache_salt", "vllm_xargs")  # as in a chat

_ROLES = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use"), "system": ("text",)}
_BLOCKS: dict[str, frozenset[str]] = {
    "text": frozenset({"type", "text", "cache_control", "citations"}),
    "thinking": frozenset({"type", "thinking", "signature"}),
    "tool_use": frozenset({"type", "id", "name", "input", "cache_control", "caller"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error", "cache_control"}),
}
_TOOL = frozenset(
    {"type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming"}
    | {"defer_loading", "input_examples", "allowed_callers"}
)
_NEUTRAL_TOOL: dict[str, Any] = {"defer_loading": False, "input_examples": [], "allowed_callers": ["direct"]}
_EFFORTS = ("low", "medium", "high", "xhigh", "max")


class MessageParam(Object):
    """One turn, or a part of it: neighbours with the same role are one turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Items[dict[str, Any]] = Field(
        description="Text, or blocks of type text, tool_result (user), thinking or tool_use (assistant)."
    )


class Tool(Object):
    """A function that the model may call."""

    name: str
    input_schema: dict[str, Any] | None = Field(None, description="JSON schema of its arguments; must be there.")
    description: str | None = None
    strict: bool | None = None
    type: str | None = Field(None, description="custom, or left out.")  # others are refused with a remedy
    cache_control: dict[str, Any] | None = Field(None, description="Not used.")
    eager_input_streaming: bool | None = Field(None, description="Not used: arguments are always sent as they come.")


class ToolChoice(Object):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="Of the tool, with type tool.")
    disable_parallel_tool_use: bool | None = None


class Thinking(Object):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, description="Not used: thinking ends where the model ends it.")
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted leaves the text out; there are no summaries, so summarized shows all of it."
    )


class JsonFormat(Object):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Object):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="The chat template gets it as reasoning_effort."
    )
    format: JsonFormat | None = None


class CountTokensRequest(Object):
    """POST /v1/messages/count_tokens"""

    model: str | None = None
    messages: Items[MessageParam]
    system: str | Items[dict[str, Any]] | None = Field(None, description="Text, or blocks of type text.")
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(None, description="The older name of output_config.format.")
    cache_control: dict[str, Any] | None = Field(None, description="Not used: all prefixes are cached.")
    speed: Literal["standard"] | None = None
    user_profile_id: str | None = Field(None, description="Not used.")
    workspace_id: str | None = Field(None, description="Not used.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the chat template.")


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages"""

    max_tokens: int = Field(ge=1)
    stop_sequences: Items[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    metadata: dict[str, Any] | None = Field(None, description="Not used.")
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description="Not used.")
    cache_salt: str | None = Field(None, description="Prefixes are shared only between requests with the same salt.")
    vllm_xargs: dict[str, Any] | None = Field(None, description="For your own logits processors.")


def to_chat(body: Mapping[str, Any], strict: bool = False) -> dict[str, Any]:
    """A body of OpenAI's chat that asks for the same. strict: no field is ignored. Raises ConfigError naming the field
    in this body."""
    given = fields(judged(body, MessagesRequest.model_fields, strict), "", MessagesRequest.model_fields)
    refuse_unless(given, NEUTRAL)
    chat = {name: given[name] for name in _SAME if name in given}
    chat["max_tokens"] = required(given, "max_tokens", int)
    chat["messages"] = _messages(given)
    if chat["messages"][-1]["role"] == "assistant":  # the beginning of the reply
        chat["continue_final_message"] = bool(text_of(chat["messages"][-1]))
    if stop := optional(given, "stop_sequences", list):
        if not all(isinstance(text, str) and text for text in stop):
            raise ConfigError(f"stop_sequences is {stop!r:.80}: give strings that are not empty")
        chat["stop"] = stop
    if tools := optional(given, "tools", list):
        chat["tools"] = [_tool(tool, where) for where, tool in objects(tools, "tools")]
    output = fields(optional(given, "output_config", dict) or {}, "output_config", OutputConfig.model_fields)
    return chat | _tool_choice(given, bool(tools)) | _template(given, output) | _format(given, output)


def count_to_chat(body: Mapping[str, Any], strict: bool = False) -> dict[str, Any]:
    """As `to_chat`, for a body that only asks how long its prompt is."""
    known = CountTokensRequest.model_fields
    return to_chat({**fields(judged(body, known, strict), "", known), "max_tokens": 1})


def omits_thinking(body: Mapping[str, Any]) -> bool:
    """Whether this request, which `to_chat` has taken, does not want to see the thinking."""
    return (body.get("thinking") or {}).get("display") == "omitted"


def _messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = []
    if given.get("system") is not None:
        found = _system(_blocks(given["system"], "system", "system"))
    turns: list[tuple[str, list[dict[str, Any]]]] = []
    messages = objects(given.get("messages"), "messages")
    for where, message in messages:
        message = fields(message, where, ("role", "content"))
        role = choice(message.get("role"), f"{where}.role", tuple(_ROLES))
        blocks = _blocks(message.get("content"), f"{where}.content", role)
        if not blocks and role != "assistant":  # a reply may have been empty
            raise ConfigError(f"{where}.content is []: give text")
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    if not turns:
        raise ConfigError("messages is []: give at least one message")
    if turns[-1][0] == "assistant" and any(block["type"] == "tool_use" for block in turns[-1][1]):
        raise ConfigError(f"{messages[-1][0]} ends with a tool_use: give its tool_result in a message of the user")
    make = {"system": _system, "user": _user, "assistant": _assistant}
    return found + [message for role, blocks in turns for message in make[role](blocks)]


def _blocks(content: object, where: str, role: str) -> list[dict[str, Any]]:
    """Blocks of types that this role may have, their fields checked."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [_block(block, place, _ROLES[role]) for place, block in objects(content, where, "text or blocks")]


def _block(block: dict[str, Any], where: str, types: tuple[str, ...]) -> dict[str, Any]:
    kind = required(block, "type", str, where)
    if kind not in types:
        raise ConfigError(f"{where}.type is {kind!r:.80}: not supported here; give blocks of type {', '.join(types)}")
    found = fields(block, where, _BLOCKS[kind])
    for name in {"text": ("text",), "thinking": ("thinking",), "tool_use": ("id", "name")}.get(kind, ("tool_use_id",)):
        required(found, name, str, where)
    if kind == "tool_use":
        required(found, "input", dict, where)
        refuse_unless(found, {"caller": {"type": "direct"}}, where)
    if kind == "tool_result":
        optional(found, "is_error", bool, where)
        found["content"] = _blocks(found.get("content", []), f"{where}.content", "system")
    return found


def _system(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": _texts(blocks)}]


def _texts(blocks: Iterable[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Content of a chat: a text, or parts where there are several."""
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    return [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else "".join(texts)


def _user(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    results = [_result(block) for block in blocks if block["type"] == "tool_result"]
    said = [block for block in blocks if block["type"] == "text"]
    return results + ([{"role": "user", "content": _texts(said)}] if said else [])


def _result(block: dict[str, Any]) -> dict[str, Any]:
    first, *others = block["content"] or [{"type": "text", "text": ""}]
    if block.get("is_error"):  # a chat has no other mark for it
        first = {**first, "text": f"Error: {first['text']}"}
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": _texts([first, *others])}


def _assistant(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    message: dict[str, Any] = {"role": "assistant", "content": _texts(blocks)}
    if thinking := "".join(block["thinking"] for block in blocks if block["type"] == "thinking"):
        message["reasoning_content"] = thinking
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)},
        }
        for block in blocks
        if block["type"] == "tool_use"
    ]
    return [{**message, "tool_calls": calls} if calls else message]


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise ConfigError(f"{where}.type is {tool['type']!r:.80}: this server runs no tools; give tools of your own")
    given = fields(tool, where, _TOOL)
    refuse_unless(given, _NEUTRAL_TOOL, where)
    function = {
        "name": required(given, "name", str, where),
        "description": optional(given, "description", str, where),
        "parameters": required(given, "input_schema", dict, where),
        "strict": optional(given, "strict", bool, where),
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _tool_choice(given: Mapping[str, Any], tools: bool) -> dict[str, Any]:
    wanted = fields(optional(given, "tool_choice", dict) or {}, "tool_choice", ToolChoice.model_fields)
    if not wanted:
        return {}
    kind = choice(wanted.get("type"), "tool_choice.type", ("auto", "any", "tool", "none"))
    if not tools and kind in ("any", "tool"):
        raise ConfigError(f"tool_choice is {wanted!r:.80}: there are no tools; give tools")
    if (kind == "tool") != ("name" in wanted):
        raise ConfigError(f"tool_choice is {wanted!r:.80}: give a name with type tool, and only with it")
    if not tools:
        return {}
    single = optional(wanted, "disable_parallel_tool_use", bool, "tool_choice")
    named = {"type": "function", "function": {"name": optional(wanted, "name", str, "tool_choice")}}
    return {
        "tool_choice": {"any": "required", "tool": named}.get(kind, kind),
        **({"parallel_tool_calls": False} if single else {}),
    }


def _template(given: Mapping[str, Any], output: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the chat template; the body's own chat_template_kwargs win."""
    variables: dict[str, Any] = {}
    if thinking := fields(optional(given, "thinking", dict) or {}, "thinking", Thinking.model_fields):
        kind = choice(thinking.get("type"), "thinking.type", ("enabled", "disabled", "adaptive"))
        optional(thinking, "budget_tokens", int, "thinking")
        if "display" in thinking:
            choice(thinking["display"], "thinking.display", ("summarized", "omitted"))
        variables["enable_thinking"] = kind != "disabled"
    if "effort" in output:
        variables["reasoning_effort"] = choice(output["effort"], "output_config.effort", _EFFORTS)
    variables |= optional(given, "chat_template_kwargs", dict) or {}
    return {"chat_template_kwargs": variables} if variables else {}


def _format(given: Mapping[str, Any], output: Mapping[str, Any]) -> dict[str, Any]:
    if "format" in output and "output_format" in given:
        raise ConfigError("output_format and output_config.format are both given; leave out output_format")
    where = "output_config.format" if "format" in output else "output_format"
    wanted = output.get("format", given.get("output_format"))
    if wanted is None:
        return {}
    wanted = fields(wanted, where, ("type", "schema"))
    if wanted.get("type") != "json_schema":
        raise ConfigError(f"{where}.type is {wanted.get('type')!r:.80}: give json_schema")
    schema = {"name": "output", "schema": required(wanted, "schema", dict, where)}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}
