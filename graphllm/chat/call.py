"""A call: what a body of OpenAI's API asks for, /v1/chat/completions or /v1/completions with vLLM's extra fields, as
prompts and sampling parameters. Plain JSON objects, for batch files and the server; `graphllm.chat.answers` is
the way back, and requests of the other APIs become such bodies first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from graphllm.chat.fields import BACKEND, judged, unguided
from graphllm.chat.forced import in_its_words
from graphllm.chat.infill import infilled
from graphllm.chat.replies import ReplyFormat
from graphllm.chat.tools import (
    ToolUse,
    check_tools,
    constraint,
    detect_reasoning,
    detect_tools,
)
from graphllm.config import ConfigError, SchedulerConfig
from graphllm.config.errors import ErrorPlace
from graphllm.config.parameter import parameters
from graphllm.config.requests.sampling_params import BeamSearchParams, SamplingParams
from graphllm.config.requests.structured_outputs import BACKENDS, StructuredOutputsParams
from graphllm.config.server import ChatConfig
from graphllm.config.vllm.kv_transfer import PARAMS
from graphllm.engine.chat_template.conversation import check_template_kwargs, conversation, text_of
from graphllm.engine.process.template_trial import TemplateTrial
from graphllm.engine.requests.processor import Prompt, Truncation
from graphllm.engine.requests.text import Tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CHAT_BATCH = "/v1/chat/completions/batch"
MAX_COMPLETIONS = 1024  # of one request
_DEFAULT_MAX_TOKENS = 16  # of a completion; a chat goes on to the end of the context
# Fields of SamplingParams that are none of a request's body.
_MAX_BEAM_TOKENS = 1 << 30  # where a body gives no limit, that of the context
_INTERNAL = frozenset(name for name, d in parameters(SamplingParams).items() if d.body is None)
_ID = re.compile(r"[A-Za-z0-9_.:/+=-]{,128}")  # what fits a header and a line of the log
_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    str: "a string",
    dict: "an object",
    list: "a list",
}


class Style(NamedTuple):
    """How a model writes tool calls (a format of `replies`, None when nobody knows), and whether it thinks in tags."""

    tools: str | None = None
    reasoning: bool = False

    @staticmethod
    def of(tokenizer: Tokenizer) -> Style:
        """As its chat template shows."""
        template = tokenizer.chat_template
        return Style(detect_tools(template), detect_reasoning(template))


_DEFAULTS = ChatConfig()


class Call(NamedTuple):
    """A request of a client.

    chat: for the chat endpoint; else for completions.
    params: sampling parameters.
    model: as the body names it.
    prompts: of a completion, text or token ids.
    messages: of a conversation.
    template: variables of the chat template.
    tools: functions that the model may call.
    priority: lower goes first.
    stream: the answer comes in chunks.
    usage: the last chunk has the usage.
    running_usage: every chunk has the usage.
    echo: the prompt comes before the completion.
    echo_only: the answer is the prompt; there is no completion.
    reasoning: the answer shows it.
    role: of the answer.
    prefix: text that an answer begins with, from echo in a chat.
    continues: the answer goes on with the last message.
    chat_template: in place of the model's.
    special: the tokenizer adds BOS and such; None: as usual for the endpoint.
    suffix: text after a completion.
    truncation: of the prompt.
    token_ids: the answer shows them.
    prompt_text: the answer shows it.
    tokens_as_ids: log-probabilities write tokens as their ids.
    interval: tokens of a chunk.
    beams: settings of a beam search for n completions.
    request_id: the client's name of the request.
    reply: how the text is read (from `write_out`).
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
    echo_only: bool = False
    reasoning: bool = True
    role: str = "assistant"
    prefix: str = ""
    continues: bool = False
    chat_template: str | None = None
    special: bool | None = None
    suffix: str = ""
    truncation: Truncation | None = None
    token_ids: bool = False
    prompt_text: bool = False
    tokens_as_ids: bool = False
    interval: int = 1
    beams: BeamSearchParams | None = None
    request_id: str = ""
    reply: ReplyFormat = ReplyFormat()

    def prompt_error(self, mistake: ConfigError, number: int, count: int) -> ConfigError:
        """A mistake in one of ``count`` prompts. The message names the prompt if the mistake is in it."""
        place = ErrorPlace("messages" if self.chat else "prompt", number)
        return place.prompt_error(mistake) if count > 1 else mistake


def parse_call(url: object, body: object, defaults: SamplingParams, config: ChatConfig = _DEFAULTS) -> Call:
    """Check the body of a request to ``url``.

    defaults: for what the body leaves open; max_tokens None is the endpoint's own default. config: of the server.
    Raises ConfigError; its message begins with the field's name (`error_body`).
    """
    if url not in (CHAT, COMPLETIONS):
        raise ConfigError(f"url is {url!r:.80}: give {CHAT} or {COMPLETIONS}")
    if not isinstance(body, dict):
        raise ConfigError(f"body is {body!r:.80}: give an object")
    chat = url == CHAT
    rest = judged(body, (PARAMS,), strict=config.strict_fields)
    rest |= unguided(rest)
    if "vllm_xargs" in rest:  # which SamplingParams has under its own name
        rest["extra_args"] = _take(rest, "vllm_xargs", dict, {})
    elif "extra_args" in rest:
        raise ConfigError(f"extra_args is {rest['extra_args']!r:.80}: not supported; give vllm_xargs")
    if PARAMS in rest:  # as in vLLM
        rest["extra_args"] = {**rest.get("extra_args", {}), PARAMS: _take(rest, PARAMS, dict, {})}
    call = Call(
        chat,
        defaults,
        model=_take(rest, "model", str, ""),
        priority=_take(rest, "priority", int, 0),
        cache_salt=_take(rest, "cache_salt", str, "") or None,
        stream=_take(rest, "stream", bool, False),
        echo=_take(rest, "echo", bool, False),
        special=_take(rest, "add_special_tokens", bool, not chat) if "add_special_tokens" in rest else None,
        token_ids=_take(rest, "return_token_ids", bool, False),
        tokens_as_ids=_take(rest, "return_tokens_as_token_ids", bool, config.return_tokens_as_token_ids),
        truncation=_truncation(rest),
        interval=_interval(rest),
        request_id=checked_id(_take(rest, "request_id", str, "")),
        role=config.response_role,
    )
    call = _streaming(call, rest, config.enable_force_include_usage)
    if chat:
        tools = check_tools(
            rest.pop("tools", None), rest.pop("tool_choice", None), _take(rest, "parallel_tool_calls", bool, True)
        )
        call = call._replace(
            messages=conversation(rest.pop("messages", None)),
            chat_template=_chat_template(rest, config.trust_request_chat_template),
            continues=_take(rest, "continue_final_message", bool, False),
            prompt_text=_take(rest, "return_prompt_text", bool, False),
            tools=tools,
            reasoning=_take(rest, "include_reasoning", bool, True),
        )
        call = _turn(call._replace(template=_template(rest, call.continues, config.default_chat_template_kwargs or {})))
        rest |= _chat_sampling(rest)
    else:
        call = call._replace(prompts=_prompts(rest.pop("prompt", None)), suffix=_take(rest, "suffix", str, ""))
        if call.echo and rest.get("max_tokens") == 0 and type(rest["max_tokens"]) is int:
            call, rest["max_tokens"] = call._replace(echo_only=True), 1
    backend = rest.pop(BACKEND, None)
    if backend not in (None, *BACKENDS):
        raise ConfigError(f"{BACKEND} is {backend!r:.80}: give one of {', '.join(BACKENDS)}")
    made = _constraint(rest, call.tools)
    if made and backend is not None:
        made["structured_outputs"]["backend"] = backend
    rest |= made
    beams = _beam_fields(rest)
    internal = sorted((_INTERNAL - {"extra_args"}) & rest.keys())
    if internal:
        raise ConfigError(f"{internal[0]} is {rest[internal[0]]!r:.80}: not supported; leave it out")
    params = SamplingParams.from_fields(rest, defaults if beams is None else replace(defaults, temperature=1.0))
    if params.max_tokens is None and not chat:
        params = replace(params, max_tokens=_DEFAULT_MAX_TOKENS)
    if call.echo and params.logprobs is not None and params.prompt_logprobs is None:
        params = replace(params, prompt_logprobs=params.logprobs)
    call = call._replace(params=params)
    return call if beams is None else _with_beams(call, beams, rest)


def checked_id(id: str) -> str:
    """The request_id of a body, empty for none. Raises ConfigError for one that no header can hold."""
    if not _ID.fullmatch(id):
        raise ConfigError(f"request_id is {id!r:.80}: give up to 128 letters, digits, and any of . : / + = _ -")
    return id


def _truncation(rest: dict[str, Any]) -> Truncation | None:
    """Takes the fields about it out of a body."""
    side = _take(rest, "truncation_side", str, "left")
    if side not in ("left", "right"):
        raise ConfigError(f"truncation_side is {side!r:.80}: give left or right")
    if "truncate_prompt_tokens" not in rest:
        return None
    tokens = _take(rest, "truncate_prompt_tokens", int, 0)
    if tokens < 1 and tokens != -1:
        raise ConfigError(f"truncate_prompt_tokens is {tokens}: give a number from 1, or -1 for as many as fit")
    return Truncation(tokens, side)


def _interval(rest: dict[str, Any]) -> int:
    interval = _take(rest, "stream_interval", int, 1)
    if interval < 1:
        raise ConfigError(f"stream_interval is {interval}: give a number of tokens from 1")
    return interval


def _chat_template(rest: dict[str, Any], allowed: bool) -> str | None:
    if "chat_template" not in rest:
        return None
    template = _take(rest, "chat_template", str, "")
    if not allowed:
        raise ConfigError(
            f"chat_template is {template!r:.80}: not taken from requests; leave it out, or start the server with "
            "--trust-request-chat-template"
        )
    return template


def _turn(call: Call) -> Call:
    """Set whether the last message goes on, or another one begins."""
    last = call.messages[-1]
    other = call.template["add_generation_prompt"]
    role = call.role if other or call.continues else last["role"]
    # As vLLM: an answer in the name of who spoke last begins with what was said.
    prefix = text_of(last) if call.echo and last["role"] == role else ""
    return call._replace(role=role, prefix=prefix)


def _beam_fields(rest: dict[str, Any]) -> dict[str, Any] | None:
    """Takes the fields of a beam search out of a body; None where there is none."""
    wanted, penalty = _take(rest, "use_beam_search", bool, False), rest.pop("length_penalty", 1)
    if wanted:
        return {"length_penalty": penalty, "temperature": rest.pop("temperature", 0.0)}
    if penalty != 1:
        raise ConfigError(f"length_penalty is {penalty!r:.80}: it has a meaning only with use_beam_search: true")
    return None


def _with_beams(call: Call, beams: Mapping[str, Any], rest: Mapping[str, Any]) -> Call:
    """A call for a beam search of width n."""
    p = call.params
    if call.stream:
        raise ConfigError("use_beam_search is True: the best sequences are known at the end; leave out stream")
    known = {"n", "max_tokens", "ignore_eos", "include_stop_str_in_output", "logprobs", "seed"}
    other = next((name for name in rest if name not in known and rest[name] not in (None, [], "", {})), None)
    if other is not None:
        raise ConfigError(f"{other} is {rest[other]!r:.80}: it has no meaning with use_beam_search; leave it out")
    if call.echo_only:
        raise ConfigError("max_tokens is 0: a beam search needs tokens; give a number from 1")
    params = BeamSearchParams(
        beam_width=p.n,
        max_tokens=p.max_tokens or _MAX_BEAM_TOKENS,
        ignore_eos=p.ignore_eos,
        include_stop_str_in_output=p.include_stop_str_in_output,
        **beams,
    )
    return call._replace(beams=params)


def _streaming(call: Call, rest: dict[str, Any], always: bool) -> Call:
    """Takes stream_options out of a body."""
    options = dict(_take(rest, "stream_options", dict, {}))
    if options and not call.stream:
        raise ConfigError(f"stream_options is {options!r:.80}: it has a meaning only with stream: true")
    usage = _take(options, "include_usage", bool, False, "stream_options.") or (always and call.stream)
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


def _template(rest: dict[str, Any], continues: bool, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Takes the fields for the chat template out of a body."""
    kwargs = _take(rest, "chat_template_kwargs", dict, {})
    check_template_kwargs(kwargs, "chat_template_kwargs")
    begins = _take(rest, "add_generation_prompt", bool, not continues)
    if begins and continues:
        raise ConfigError(
            "continue_final_message is True: with add_generation_prompt another message begins; give one of the two"
        )
    documents = {"documents": _take(rest, "documents", list, [])} if "documents" in rest else {}
    effort = {"reasoning_effort": _take(rest, "reasoning_effort", str, "")} if "reasoning_effort" in rest else {}
    return {**defaults, **documents, **effort, **kwargs, "add_generation_prompt": begins}


def _chat_sampling(rest: dict[str, Any]) -> dict[str, Any]:
    """Takes the fields that only a chat has out of a body; the result has fields of `SamplingParams`."""
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


def write_out(
    call: Call, tokenizer: Tokenizer, style: Style, templates: TemplateTrial | None = None
) -> tuple[Call, Sequence[Prompt]]:
    """What a processor takes, a chat written out by the chat template, and the call with how its reply is read. Prompts
    that are echoed have their text with them. templates: renders chat templates of requests.

    Raises ConfigError when the template refuses, and for tools that the model has no known way to call.
    """
    if not call.chat:
        prompts: Sequence[Prompt] = call.prompts
        if call.suffix:
            prompts = [infilled(prompt, call.suffix, tokenizer) for prompt in prompts]
        if call.echo:
            prompts = [_with_text(prompt, tokenizer) for prompt in prompts]
        return call, [_prompt_of(prompt, call) for prompt in prompts]
    use, text = call.tools, rendered(call, tokenizer, templates)
    format = _tool_format(use, style)
    if format is not None and format == style.tools and use.choice != "auto":
        made = StructuredOutputsParams(calls=in_its_words(use, format, tokenizer))
        call = call._replace(params=replace(call.params, structured_outputs=made))
    # A grammar holds from the first token on, so there is no thinking before it; but for one with a budget.
    constrained = call.params.structured_outputs is not None and call.params.thinking_token_budget is None
    call = call._replace(
        reply=ReplyFormat(
            reasoning=style.reasoning,
            thinking=style.reasoning and _thinks(text, call.continues) and not constrained,
            tools=format,
            name=use.choice if format == "named" else "",
            names=frozenset(tool["function"]["name"] for tool in use.tools),
            single=use.choice == "auto" and not use.parallel,
        )
    )
    if call.params.skip_special_tokens and _marks_are_special(format, tokenizer):
        call = call._replace(params=replace(call.params, skip_special_tokens=False))
    # The template has written BOS where it wants one, so none is added.
    prompt: dict[str, Any] = {"prompt": text, "add_special_tokens": bool(call.special)}
    if call.reply.reasoning and call.params.stop:  # which are about the answer
        prompt["thinking"] = call.reply.thinking
    return call, [_prompt_of(prompt, call)]


def _prompt_of(prompt: Prompt, call: Call) -> Prompt:
    """A prompt with what the call says of it."""
    more: dict[str, Any] = {} if call.truncation is None else {"truncation": call.truncation}
    if not call.chat and call.special is False:
        more["add_special_tokens"] = False
    if not more:
        return prompt
    given = (
        prompt if isinstance(prompt, Mapping) else {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    )
    return {**given, **more}


def _thinks(text: str, continues: bool) -> bool:
    """Whether a reply to this begins within the thinking."""
    return text.rfind("<think>") > text.rfind("</think>") if continues else text.rstrip().endswith("<think>")


def _with_text(prompt: Prompt, tokenizer: Tokenizer) -> Prompt:
    """Token ids with what they say, where they are any; a processor refuses others."""
    if not isinstance(prompt, list) or not all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in prompt):
        return prompt
    return {"prompt": tokenizer.decode(prompt, skip_special_tokens=False), "prompt_token_ids": prompt}


def rendered(call: Call, tokenizer: Tokenizer, templates: TemplateTrial | None = None) -> str:
    """A chat as the model sees it. Raises ConfigError when its template refuses."""
    source = call.chat_template
    render = None if source is None or templates is None else partial(templates.render, source)
    shown: dict[str, Any] = {} if call.tools.choice == "none" else {"tools": call.tools.tools}
    return tokenizer.render_chat(
        call.messages, render=render, continue_final_message=call.continues, **shown, **call.template
    )


def _marks_are_special(format: str | None, tokenizer: Tokenizer) -> bool:
    """Whether a call's marks are special tokens; with Hermes' format, of some models only."""
    if format == "hermes":
        return not tokenizer.decode(tokenizer.encode("<tool_call>", add_special_tokens=False))
    return format in ("mistral", "llama3")


def _tool_format(use: ToolUse, style: Style) -> str | None:
    if use.choice == "none":
        return None
    if style.tools is not None:
        return style.tools
    if use.choice == "auto":
        raise ConfigError(
            "tool_choice is 'auto': nobody knows how this model writes calls; give tool_choice: required, or start "
            "with --tool-call-parser"
        )
    return "json" if use.choice == "required" else "named"
