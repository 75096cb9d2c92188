"""A call: what a body of OpenAI's API asks for, /v1/chat/completions or /v1/completions with vLLM's extra fields, as
prompts and sampling parameters. Plain JSON objects, for batch files and the server; `graphllm.server.openai.answers` is
the way back, and requests of the other APIs become such bodies first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from graphllm.config import ConfigError, SchedulerConfig
from graphllm.config.parameter import parameters
from graphllm.config.sampling import SamplingParams
from graphllm.engine.processor import Prompt
from graphllm.engine.text import Tokenizer
from graphllm.server.chat.replies import ReplyFormat
from graphllm.server.chat.tools import (
    ToolUse,
    check_label,
    check_tools,
    constraint,
    detect_reasoning,
    detect_tools,
    for_template,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_COMPLETIONS = 1024  # of one request
_DEFAULT_MAX_TOKENS = 16  # of a completion; a chat goes on to the end of the context
# About whose request it is and how it is billed, not about the output.
_IGNORED = frozenset(
    {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "user"}
)
# Without support, with the value that changes nothing.
_NEUTRAL: dict[str, Any] = {
    "continue_final_message": False,
    "functions": [],
    "modalities": ["text"],
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "store": False,
    "suffix": "",
}
# Fields of SamplingParams that are none of a request's body.
_INTERNAL = frozenset(name for name, d in parameters(SamplingParams).items() if d.body is None)
_ROLE = re.compile(r"[a-zA-Z][a-zA-Z0-9_-]{0,31}")  # some templates know others than OpenAI's
_KINDS: dict[type, str] = {bool: "true or false", int: "a whole number", str: "a string", dict: "an object"}


class Style(NamedTuple):
    """How a model writes tool calls (a format of `replies`, None when nobody knows), and whether it thinks in tags."""

    tools: str | None = None
    reasoning: bool = False

    @staticmethod
    def of(tokenizer: Tokenizer) -> Style:
        """As its chat template shows."""
        template = tokenizer.chat_template
        return Style(detect_tools(template), detect_reasoning(template))


class Call(NamedTuple):
    """What a body asks for. chat: of which endpoint. model: as the body names it. prompts: of a completion, text or
    token ids. messages, template: a conversation, and what else the chat template is told. tools: that it may call.
    priority: lower goes first. stream, usage, running_usage: chunks, one with the usage at the end, or in every chunk.
    echo: the prompt comes before the completion; alone: and nothing else does. reasoning: it is shown.
    reply, hidden: how the text is read, and tokens that end it and are not shown (from `write_out`).
    """

    chat: bool
    params: SamplingParams
    model: str = ""
    prompts: Sequence[Prompt] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    template: Mapping[str, Any] = {}
    tools: ToolUse = ToolUse([], "none", True)
    priority: int = 0
    cache_salt: str | None = None
    stream: bool = False
    usage: bool = False
    running_usage: bool = False
    echo: bool = False
    alone: bool = False
    reasoning: bool = True
    reply: ReplyFormat = ReplyFormat()
    hidden: tuple[str, ...] = ()


def parse_call(url: object, body: object, defaults: SamplingParams) -> Call:
    """Check the body of a request to ``url``.

    defaults: for what the body leaves open; max_tokens None is the endpoint's own default. Raises ConfigError, whose
    message begins with the field's name (`error_body`).
    """
    if url not in (CHAT, COMPLETIONS):
        raise ConfigError(f"url is {url!r:.80}: give {CHAT} or {COMPLETIONS}")
    if not isinstance(body, dict):
        raise ConfigError(f"body is {body!r:.80}: give an object")
    chat = url == CHAT
    rest = {name: value for name, value in body.items() if value is not None and name not in _IGNORED}
    for name, neutral in {**_NEUTRAL, "add_special_tokens": not chat}.items():
        if (value := rest.pop(name, neutral)) != neutral:
            raise ConfigError(f"{name} is {value!r:.80}: not supported; leave it out")
    call = Call(
        chat,
        defaults,
        model=_take(rest, "model", str, ""),
        priority=_take(rest, "priority", int, 0),
        cache_salt=_take(rest, "cache_salt", str, "") or None,
        stream=_take(rest, "stream", bool, False),
        echo=_take(rest, "echo", bool, False),
    )
    call = _streaming(call, rest)
    if chat:
        if call.echo:
            raise ConfigError("echo is True: not supported; leave it out")
        tools = check_tools(
            rest.pop("tools", None), rest.pop("tool_choice", None), _take(rest, "parallel_tool_calls", bool, True)
        )
        call = call._replace(
            messages=_messages(rest.pop("messages", None)),
            template=_template(rest),
            tools=tools,
            reasoning=_take(rest, "include_reasoning", bool, True),
        )
        rest |= _chat_sampling(rest)
    else:
        call = call._replace(prompts=_prompts(rest.pop("prompt", None)))
        if call.echo and rest.get("max_tokens") == 0 and type(rest["max_tokens"]) is int:
            call, rest["max_tokens"] = call._replace(alone=True), 1
    rest |= _constraint(rest, call.tools)
    internal = sorted(_INTERNAL & rest.keys())
    if internal:
        raise ConfigError(f"{internal[0]} is {rest[internal[0]]!r:.80}: not supported; leave it out")
    params = SamplingParams.from_fields(rest, defaults)
    if params.max_tokens is None and not chat:
        params = replace(params, max_tokens=_DEFAULT_MAX_TOKENS)
    if call.echo and params.logprobs is not None and params.prompt_logprobs is None:
        params = replace(params, prompt_logprobs=params.logprobs)
    return call._replace(params=params)


def _streaming(call: Call, rest: dict[str, Any]) -> Call:
    """Takes stream_options out of a body."""
    options = dict(_take(rest, "stream_options", dict, {}))
    if options and not call.stream:
        raise ConfigError(f"stream_options is {options!r:.80}: it has a meaning only with stream: true")
    usage = _take(options, "include_usage", bool, False, "stream_options.")
    running = _take(options, "continuous_usage_stats", bool, False, "stream_options.")
    if options.pop("include_obfuscation", False) is not False or options:
        raise ConfigError(
            f"stream_options has {next(iter(options), 'include_obfuscation')!r:.80}: not supported; leave it out"
        )
    return call._replace(usage=usage, running_usage=usage and running)


def _take(rest: dict[str, Any], name: str, kind: type, default: Any, within: str = "") -> Any:
    value = rest.pop(name, default)
    if type(value) is not kind:  # a bool is no number
        raise ConfigError(f"{within}{name} is {value!r:.80}: give {_KINDS[kind]}")
    return value


def _template(rest: dict[str, Any]) -> dict[str, Any]:
    """Takes the fields for the chat template out of a body."""
    kwargs = _take(rest, "chat_template_kwargs", dict, {})
    reserved = sorted(kwargs.keys() & {"messages", "tools", "add_generation_prompt"})
    if reserved:
        raise ConfigError(f"chat_template_kwargs has {reserved[0]!r}: it cannot be set there; leave it out")
    effort = {"reasoning_effort": _take(rest, "reasoning_effort", str, "")} if "reasoning_effort" in rest else {}
    return {**effort, **kwargs, "add_generation_prompt": _take(rest, "add_generation_prompt", bool, True)}


def _chat_sampling(rest: dict[str, Any]) -> dict[str, Any]:
    """Takes the fields that only a chat has out of a body; as those of `SamplingParams`."""
    found: dict[str, Any] = {}
    if "max_completion_tokens" in rest:  # the new name, which wins
        found["max_tokens"] = _take(rest, "max_completion_tokens", int, 0)
    wanted, top = _take(rest, "logprobs", bool, False), _take(rest, "top_logprobs", int, 0)
    if top and not wanted:
        raise ConfigError(f"top_logprobs is {top}: give logprobs: true with it")
    if top < -1:
        raise ConfigError(f"top_logprobs is {top}: give a number from 0, or -1 for the whole vocabulary")
    return found | ({"logprobs": top} if wanted else {})


def _constraint(rest: dict[str, Any], tools: ToolUse) -> dict[str, Any]:
    """Takes response_format out of a body; as structured_outputs. A call that must be made is one too."""
    wanted = _take(rest, "response_format", dict, {"type": "text"})
    kind = wanted.get("type")
    forced = constraint(tools)
    given = ["response_format"] * (kind != "text") + ["structured_outputs"] * ("structured_outputs" in rest)
    given += ["tool_choice"] * (forced is not None)
    if len(given) > 1:
        raise ConfigError(
            f"{given[0]} and {given[1]} are both given and ask for different texts; leave out one of them"
        )
    if forced is not None:
        return {"structured_outputs": forced}
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"structured_outputs": {"json_object": True}}
    if kind != "json_schema":
        raise ConfigError(f"response_format.type is {kind!r:.80}: give text, json_object or json_schema")
    schema = wanted.get("json_schema")
    if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
        raise ConfigError("response_format.json_schema has no schema: give an object with name and schema")
    return {"structured_outputs": {"json": schema["schema"]}}


def _messages(given: object) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise ConfigError(f"messages is {given!r:.80}: give at least one message")
    for i, message in enumerate(given):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(f"messages[{i}] is {message!r:.80}: give an object with role and content")
        # Templates write these as they stand, so one that looks like a template's own mark would be taken for it.
        if not _ROLE.fullmatch(message["role"]):
            raise ConfigError(f"messages[{i}].role is {message['role']!r:.80}: give system, user, assistant or tool")
        for name in ("name", "tool_call_id"):
            if message.get(name) is not None:
                check_label(message[name], f"messages[{i}].{name}")
    texts = [{**m, "content": _text(m["content"], f"messages[{i}]")} if "content" in m else m
             for i, m in enumerate(given)]  # fmt: skip
    # The newer name of the same role, which no template knows.
    return [{**m, "role": "system"} if m["role"] == "developer" else m for m in texts]


def _text(content: object, where: str) -> str | None:
    """Content as templates take it: the texts of its parts, a line each."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ConfigError(f"{where}.content is {content!r:.80}: give text, or a list of parts of type text")
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise ConfigError(f"{where}.content has {part!r:.80}: not supported; give parts of type text")
    return "\n".join(part["text"] for part in content)


def _prompts(given: object) -> list[Prompt]:
    """One or several: text or token ids each."""
    if isinstance(given, str) or (isinstance(given, list) and given and all(type(i) is int for i in given)):
        return [given]
    if isinstance(given, list) and given and all(isinstance(p, (str, list)) for p in given):
        return given
    raise ConfigError(f"prompt is {given!r:.80}: give text, token ids, or a list of these")


def check_priority(call: Call, options: SchedulerConfig) -> None:
    """Raises ConfigError for a priority that the engine would not look at."""
    if call.priority and options.scheduling_policy != "priority":
        raise ConfigError(f"priority is {call.priority}: it has a meaning only with --scheduling-policy priority")


def write_out(call: Call, tokenizer: Tokenizer, style: Style) -> tuple[Call, Sequence[Prompt]]:
    """What a processor takes, a chat written out by the chat template, and the call with how its reply is read. Prompts
    that are echoed have their text with them.

    Raises ConfigError when the template refuses, and for tools that the model has no known way to call.
    """
    if not call.chat:
        return call, [_with_text(prompt, tokenizer) for prompt in call.prompts] if call.echo else call.prompts
    use, text = call.tools, rendered(call, tokenizer, style)
    constrained = call.params.structured_outputs is not None
    call = call._replace(
        reply=ReplyFormat(
            reasoning=style.reasoning,
            # A grammar holds from the first token on, so there is no thinking before it.
            thinking=style.reasoning and text.rstrip().endswith("<think>") and not constrained,
            tools=_tool_format(use, style),
            name=use.choice if use.choice not in ("none", "auto", "required") else "",
            names=frozenset(tool["function"]["name"] for tool in use.tools),
            single=use.choice == "auto" and not use.parallel,
        )
    )
    if call.reply.tools in ("mistral", "llama3") and call.params.skip_special_tokens:
        # Their marks of a call are special tokens.
        params = call.params
        ends = tokenizer.stop_ids.union(() if params.include_stop_str_in_output else params.stop_token_ids)
        call = call._replace(
            params=replace(params, skip_special_tokens=False),
            hidden=tuple(tokenizer.decode([i], skip_special_tokens=False) for i in sorted(ends)),
        )
    # The template has written BOS where it wants one, so none is added.
    return call, [{"prompt": text, "add_special_tokens": False}]


def _with_text(prompt: Prompt, tokenizer: Tokenizer) -> Prompt:
    """Token ids with what they say, where they are any; a processor refuses others."""
    if not isinstance(prompt, list) or not all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in prompt):
        return prompt
    return {"prompt": tokenizer.decode(prompt, skip_special_tokens=False), "prompt_token_ids": prompt}


def rendered(call: Call, tokenizer: Tokenizer, style: Style) -> str:
    """A chat as the model sees it. Raises ConfigError when its template refuses."""
    shown: dict[str, Any] = {} if call.tools.choice == "none" else {"tools": call.tools.tools}
    return tokenizer.render_chat(for_template(call.messages, style.tools), **shown, **call.template)


def _tool_format(use: ToolUse, style: Style) -> str | None:
    match use.choice:
        case "none":
            return None
        case "required":
            return "json"
        case "auto":
            if style.tools is None:
                raise ConfigError(
                    "tool_choice is 'auto': nobody knows how this model writes calls; give tool_choice: required, or "
                    "start with --tool-call-parser"
                )
            return style.tools
    return "named"
