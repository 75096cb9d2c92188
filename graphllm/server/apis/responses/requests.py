"""Requests of OpenAI's Responses API become bodies of its chat; `graphllm.server.apis.responses.events` is the way
back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from graphllm.chat.fields import judged
from graphllm.config import ConfigError
from graphllm.engine.chat_template.conversation import text_of
from graphllm.engine.chat_template.template import plain
from graphllm.server.http.bodies import (
    Items,
    Object,
    choice,
    fields,
    objects,
    optional,
    refuse_unless,
    required,
)

Chat = list[dict[str, Any]]  # messages of a chat

_Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
_SAME = (  # as in a chat
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias", "structured_outputs", "priority", "cache_salt",
    "include_reasoning", "request_id", "vllm_xargs",
)  # fmt: skip
_NEUTRAL_TOOL: dict[str, Any] = {"async": False, "defer_loading": False, "allowed_callers": ["direct"]}
_LOGPROBS = "message.output_text.logprobs"
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_NEUTRAL_STREAM: dict[str, Any] = {"include_obfuscation": False}
_SUMMARIES = ("auto", "concise", "detailed")
_FORMAT = ("type", "name", "schema", "description", "strict")
_TEXTS = ("input_text", "output_text", "text")
_ITEMS: dict[str, frozenset[str]] = {
    "message": frozenset({"type", "id", "role", "content", "status", "phase"}),
    "function_call": frozenset({"type", "id", "call_id", "name", "arguments", "status"}),
    "function_call_output": frozenset({"type", "id", "call_id", "output", "status"}),
    "reasoning": frozenset({"type", "id", "summary", "content", "status"}),
}


class FunctionTool(Object):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of its arguments.")
    strict: bool | None = None


class ReasoningConfig(Object):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="The chat template gets it as reasoning_effort; none also as enable_thinking: false."
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Not used: the reasoning itself comes, all of it."
    )


class TextFormat(Object):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, description="Of the schema, with type json_schema.")
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(Object):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Not used.")


class StreamOptions(Object):
    include_obfuscation: Literal[False] | None = None


class StructuredOutputs(Object):
    """What the output must look like; exactly one of the first five."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    backend: str | None = None


class ResponsesRequest(Object):
    """POST /v1/responses"""

    model: str | None = None
    input: str | Items[dict[str, Any]] = Field(
        description="What the user says, or items of type message, function_call, function_call_output or reasoning."
    )
    instructions: str | None = Field(None, description="Comes first; the next response does not inherit it.")
    previous_response_id: str | None = Field(None, description="Goes on from a response that was stored.")
    store: bool | None = Field(None, description="Keep the response for later requests; true when left out.")
    background: bool | None = Field(None, description="Answer at once, and go on with the response.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    tools: Items[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = Field(
        None, description='auto, none, required, or {"type": "function", "name": ...}.'
    )
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Items[str] | None = Field(
        None, description=f"{_LOGPROBS}: log-probabilities of the text's tokens; other values are refused."
    )
    top_logprobs: int | None = Field(
        None, ge=-1, description=f"The number of likeliest tokens at each position, with include: [{_LOGPROBS}]."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto leaves out the oldest turns of a conversation that is longer than the context."
    )
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = Field(None, description="Not used: all prefixes are cached.")
    prompt_cache_retention: Literal["in_memory", "24h"] | None = Field(None, description="Not used.")
    service_tier: Literal["auto", "default"] | None = None
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: _Int64 | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    logit_bias: dict[str, float] | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: _Int64 | None = Field(None, description="Lower goes first.")
    cache_salt: str | None = Field(None, description="Prefixes are shared only between requests with the same salt.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the chat template.")
    include_reasoning: bool | None = Field(None, description="false leaves the reasoning out of the answer.")
    request_id: str | None = Field(None, description="For the log and the header x-request-id.")
    vllm_xargs: dict[str, Any] | None = Field(None, description="For your own logits processors.")


def to_chat(body: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]] = (), strict: bool = False) -> dict[str, Any]:
    """A body of OpenAI's chat that asks for the same. earlier: the conversation of the previous response. strict: no
    field is ignored.

    Raises ConfigError naming the field in this body.
    """
    known = ResponsesRequest.model_fields
    given = fields(judged(body, known, strict), "", known)
    _check(given)
    chat = {name: given[name] for name in _SAME if name in given}
    instructions = optional(given, "instructions", str)
    first = [] if instructions is None else [{"role": "system", "content": instructions}]
    chat["messages"] = first + conversation(given, earlier)
    if "max_output_tokens" in given:
        chat["max_tokens"] = given["max_output_tokens"]
    if _LOGPROBS in (optional(given, "include", list) or []):
        chat |= {"logprobs": True, "top_logprobs": given.get("top_logprobs", 0)}
    if tools := optional(given, "tools", list):
        chat["tools"] = [_tool(tool, where) for where, tool in objects(tools, "tools")]
        chat |= {"parallel_tool_calls": given["parallel_tool_calls"]} if "parallel_tool_calls" in given else {}
    return chat | _tool_choice(given.get("tool_choice"), bool(tools)) | _format(given) | _template(given)


def conversation(body: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]] = ()) -> Chat:
    """The messages so far, as a response after this one continues them: without the instructions."""
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = messages_of(items, "input")
    if not messages:
        raise ConfigError("input is []: give text or items")
    return [*map(dict, earlier), *messages]


def input_items(body: Mapping[str, Any], response_id: str) -> Chat:
    """The items of a request that `to_chat` has taken, in OpenAI's form, each with an id."""
    given = body["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    found = []
    for i, item in enumerate(items):
        item = {"id": f"item_{response_id.removeprefix('resp_')}_{i}", "type": "message", **item}
        if item["type"] == "message" and isinstance(item["content"], str):
            kind = "output_text" if item["role"] == "assistant" else "input_text"
            more: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
            item["content"] = [{"type": kind, "text": item["content"], **more}]
        found.append(item)
    return found


def _check(given: Mapping[str, Any]) -> None:
    """What no chat has, and is kept or answered by the endpoint, or cannot be served."""
    for name in ("previous_response_id", "user", "safety_identifier", "prompt_cache_key"):
        optional(given, name, str)
    for name in ("store", "background", "parallel_tool_calls"):
        optional(given, name, bool)
    if given.get("background") and given.get("store") is False:
        raise ConfigError("background is True: what is not stored could not be asked for; leave out store")
    options = fields(optional(given, "stream_options", dict) or {}, "stream_options", _NEUTRAL_STREAM)
    refuse_unless(options, _NEUTRAL_STREAM, "stream_options")
    limit = optional(given, "max_output_tokens", int)
    if limit is not None and limit < 1:
        raise ConfigError(f"max_output_tokens is {limit}: give a number from 1")
    if "service_tier" in given:
        choice(given["service_tier"], "service_tier", ("auto", "default"))
    if "prompt_cache_retention" in given:
        choice(given["prompt_cache_retention"], "prompt_cache_retention", ("in_memory", "24h"))
    if not all(isinstance(value, str) for value in (optional(given, "metadata", dict) or {}).values()):
        raise ConfigError(f"metadata is {given['metadata']!r:.80}: give texts by name")
    if "truncation" in given:
        choice(given["truncation"], "truncation", ("auto", "disabled"))
    top = optional(given, "top_logprobs", int)
    if top and _LOGPROBS not in (optional(given, "include", list) or []):
        raise ConfigError(f"top_logprobs is {top}: give include: [{_LOGPROBS!r}] with it")


def messages_of(items: object, where: str) -> Chat:
    """The messages of a chat that items are, their own or a response's. where: their place, for ConfigError.

    What the model said in a row, reasoning, text and calls, is one message.
    """
    messages: Chat = []
    for place, item in objects(items, where, "text, or a list of items"):
        kind = item.get("type") or ("message" if "role" in item else None)
        if not isinstance(kind, str) or kind not in _ITEMS:
            raise ConfigError(f"{place}.type is {kind!r:.80}: not supported; give {', '.join(_ITEMS)}")
        message = _READERS[kind](fields(item, place, _ITEMS[kind]), place)
        if messages and messages[-1]["role"] == message["role"] == "assistant":
            messages[-1] = _together(messages[-1], message)
        else:
            messages.append(message)
    return messages


def _together(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    both = {**first, **second}
    if first["content"] and second["content"]:
        both["content"] = f"{text_of(first)}\n{text_of(second)}"
    else:
        both["content"] = first["content"] or second["content"]
    if thoughts := [m["reasoning_content"] for m in (first, second) if m.get("reasoning_content")]:
        both["reasoning_content"] = "\n".join(thoughts)
    if calls := [*first.get("tool_calls", []), *second.get("tool_calls", [])]:
        both["tool_calls"] = calls
    return both


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = choice(item.get("role"), f"{where}.role", ("user", "assistant", "system", "developer"))
    # The newer name of the same role, which stored conversations do not have.
    return {
        "role": "system" if role == "developer" else role,
        "content": _content(item.get("content"), f"{where}.content"),
    }


def _content(content: object, where: str) -> str | list[dict[str, Any]]:
    """Content of a chat: a text, or parts where there are several."""
    if isinstance(content, str):
        return content
    texts = []
    for place, part in objects(content, where, f"text, or a list of parts of type {' or '.join(_TEXTS[:2])}"):
        kind = part.get("type")
        if kind not in (*_TEXTS, "refusal"):
            raise ConfigError(
                f"{place}.type is {kind!r:.80}: not supported; give parts of type {' or '.join(_TEXTS[:2])}"
            )
        texts.append(required(part, "refusal" if kind == "refusal" else "text", str, place))
    return [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else "".join(texts)


def _call(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    arguments = required(item, "arguments", str, where)
    if not is_object(arguments):
        raise ConfigError(f"{where}.arguments is {arguments!r:.80}: give the JSON of an object")
    function = {"name": required(item, "name", str, where), "arguments": arguments or "{}"}
    call = {"id": required(item, "call_id", str, where), "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def is_object(arguments: str) -> bool:
    """Whether a call with these arguments can be shown to the model again; none at all are an empty object."""
    try:
        return isinstance(plain(json.loads(arguments or "{}"), ""), dict)
    except (ValueError, RecursionError):  # ConfigError is a ValueError
        return False


def _output(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    text = _content(item.get("output"), f"{where}.output")
    return {"role": "tool", "tool_call_id": required(item, "call_id", str, where), "content": text}


def _reasoning(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Its text, or what somebody else made of that."""
    for name in ("content", "summary"):
        if parts := objects(item.get(name, []), f"{where}.{name}"):
            text = "\n".join(required(part, "text", str, place) for place, part in parts)
            return {"role": "assistant", "content": "", "reasoning_content": text}
    return {"role": "assistant", "content": ""}


_READERS: dict[str, Callable[[Mapping[str, Any], str], dict[str, Any]]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _output,
    "reasoning": _reasoning,
}


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ConfigError(f"{where}.type is {tool.get('type')!r:.80}: not supported; give tools of type function")
    given = fields(tool, where, {*FunctionTool.model_fields, *_NEUTRAL_TOOL})
    refuse_unless(given, _NEUTRAL_TOOL, where)
    required(given, "name", str, where)
    function = {name: given[name] for name in ("name", "description", "parameters", "strict") if name in given}
    for name, kind in (("description", str), ("parameters", dict), ("strict", bool)):
        optional(given, name, kind, where)
    return {"type": "function", "function": function}


def _tool_choice(wanted: object, tools: bool) -> dict[str, Any]:
    if wanted is None:
        return {}
    if isinstance(wanted, dict):
        found = fields(wanted, "tool_choice", ("type", "name"))
        if found.get("type") != "function":
            raise ConfigError(f"tool_choice.type is {found.get('type')!r:.80}: not supported; give function")
        chosen: Any = {"type": "function", "function": {"name": required(found, "name", str, "tool_choice")}}
    else:
        chosen = choice(wanted, "tool_choice", ("auto", "none", "required"))
    if tools:
        return {"tool_choice": chosen}
    if chosen not in ("auto", "none"):
        raise ConfigError(f"tool_choice is {wanted!r:.80}: there are no tools; give tools")
    return {}


def _format(given: Mapping[str, Any]) -> dict[str, Any]:
    text = fields(optional(given, "text", dict) or {}, "text", TextConfig.model_fields)
    if "verbosity" in text:
        choice(text["verbosity"], "text.verbosity", ("low", "medium", "high"))
    wanted = fields(optional(text, "format", dict, "text") or {"type": "text"}, "text.format", _FORMAT)
    kind = choice(wanted.get("type"), "text.format.type", ("text", "json_object", "json_schema"))
    if kind == "text":
        return {}
    if "structured_outputs" in given:
        raise ConfigError("text.format and structured_outputs are both given; leave out one of them")
    if kind == "json_object":
        return {"response_format": {"type": kind}}
    required(wanted, "name", str, "text.format")
    required(wanted, "schema", dict, "text.format")
    schema = {name: value for name, value in wanted.items() if name != "type"}
    return {"response_format": {"type": kind, "json_schema": schema}}


def _template(given: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the chat template; the body's own chat_template_kwargs win."""
    reasoning = fields(optional(given, "reasoning", dict) or {}, "reasoning", ReasoningConfig.model_fields)
    variables: dict[str, Any] = {}
    if "summary" in reasoning:
        choice(reasoning["summary"], "reasoning.summary", _SUMMARIES)
    if "effort" in reasoning:
        variables["reasoning_effort"] = choice(reasoning["effort"], "reasoning.effort", _EFFORTS)
        if reasoning["effort"] == "none":
            variables["enable_thinking"] = False
    variables |= optional(given, "chat_template_kwargs", dict) or {}
    return {"chat_template_kwargs": variables} if variables else {}
