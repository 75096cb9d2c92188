"""The bodies of OpenAI's API, /v1/chat/completions and /v1/completions, with vLLM's extra fields: a request's becomes
prompts and sampling parameters, finished outputs become a response's. Plain JSON objects, for batch files and servers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from graphllm.config import ConfigError
from graphllm.engine.outputs import CompletionOutput, Logprob, Position, RequestOutput
from graphllm.engine.params import SamplingParams
from graphllm.engine.processor import Prompt
from graphllm.engine.text import Tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_DEFAULT_MAX_TOKENS = 16  # of a completion; a chat goes on to the end of the context
_LOWEST = -9999.0  # stands for the logarithm of 0, which JSON has not

# About whose request it is and how it is billed, not about the output.
_IGNORED = frozenset(
    {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "user"}
)
# Without support, with the value that changes nothing.
_NEUTRAL: dict[str, Any] = {
    "continue_final_message": False,
    "echo": False,
    "functions": [],
    "include_reasoning": True,
    "modalities": ["text"],
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "store": False,
    "stream": False,
    "suffix": "",
    "tool_choice": "none",
    "tools": [],
}
# Fields of SamplingParams that are none of a request's body.
_INTERNAL = frozenset({"detokenize", "output_kind", "skip_reading_prefix_cache", "extra_args"})
_KINDS: dict[type, str] = {bool: "true or false", int: "a whole number", str: "a string", dict: "an object"}


class Call(NamedTuple):
    """What a body asks for. chat: of which endpoint. model: as the body names it. prompts: of a completion, text or
    token ids. messages, template: a conversation, and what else the chat template is told. priority: lower goes first.
    """

    chat: bool
    params: SamplingParams
    model: str = ""
    prompts: Sequence[Prompt] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    template: Mapping[str, Any] = {}
    priority: int = 0
    cache_salt: str | None = None


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
    )
    if chat:
        call = call._replace(messages=_messages(rest.pop("messages", None)), template=_template(rest))
        rest |= _chat_sampling(rest)
    else:
        call = call._replace(prompts=_prompts(rest.pop("prompt", None)))
    rest |= _constraint(rest)
    internal = sorted(_INTERNAL & rest.keys())
    if internal:
        raise ConfigError(f"{internal[0]} is {rest[internal[0]]!r:.80}: not supported; leave it out")
    params = SamplingParams.from_fields(rest, defaults)
    if params.max_tokens is None and not chat:
        params = replace(params, max_tokens=_DEFAULT_MAX_TOKENS)
    return call._replace(params=params)


def _take(rest: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = rest.pop(name, default)
    if type(value) is not kind:  # a bool is no number
        raise ConfigError(f"{name} is {value!r:.80}: give {_KINDS[kind]}")
    return value


def _template(rest: dict[str, Any]) -> dict[str, Any]:
    """Takes the fields for the chat template out of a body."""
    kwargs = _take(rest, "chat_template_kwargs", dict, {})
    reserved = sorted(kwargs.keys() & {"messages", "tools", "add_generation_prompt"})
    if reserved:
        raise ConfigError(f"chat_template_kwargs has {reserved[0]!r}: it cannot be set there; leave it out")
    return {**kwargs, "add_generation_prompt": _take(rest, "add_generation_prompt", bool, True)}


def _chat_sampling(rest: dict[str, Any]) -> dict[str, Any]:
    """Takes the fields that only a chat has out of a body; as those of `SamplingParams`."""
    # It allows more than one call of a tool at once, and there are none.
    _take(rest, "parallel_tool_calls", bool, True)
    found: dict[str, Any] = {}
    if "max_completion_tokens" in rest:  # the new name, which wins
        found["max_tokens"] = _take(rest, "max_completion_tokens", int, 0)
    wanted, top = _take(rest, "logprobs", bool, False), _take(rest, "top_logprobs", int, 0)
    if top and not wanted:
        raise ConfigError(f"top_logprobs is {top}: give logprobs: true with it")
    if top < -1:
        raise ConfigError(f"top_logprobs is {top}: give a number from 0, or -1 for the whole vocabulary")
    return found | ({"logprobs": top} if wanted else {})


def _constraint(rest: dict[str, Any]) -> dict[str, Any]:
    """Takes response_format out of a body; as structured_outputs."""
    wanted = _take(rest, "response_format", dict, {"type": "text"})
    kind = wanted.get("type")
    if kind == "text":
        return {}
    if "structured_outputs" in rest:
        raise ConfigError("response_format and structured_outputs are both given; leave out one of them")
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
    return [{**m, "content": _text(m["content"], f"messages[{i}]")} if "content" in m else m
            for i, m in enumerate(given)]  # fmt: skip


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


def prompts_of(call: Call, tokenizer: Tokenizer) -> Sequence[Prompt]:
    """What a processor takes: a chat is written out by the chat template. Raises ConfigError when that refuses."""
    if not call.chat:
        return call.prompts
    text = tokenizer.render_chat(call.messages, **call.template)
    # The template has written BOS where it wants one, so none is added.
    return [{"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}]


def error_body(message: str, body: object = None, type: str = "invalid_request_error") -> dict[str, Any]:
    """The body of an error. message: of a ConfigError about ``body``, so it begins with a field, which is named."""
    found = re.match(r"\w+", message)
    param = found[0] if found else None
    fields = body if isinstance(body, dict) else {}
    if param not in fields:  # what a field was turned into
        origin = {"prompt": "messages", "structured_outputs": "response_format", "max_tokens": "max_completion_tokens"}
        param = origin.get(param or "")
    return {"error": {"message": message, "type": type, "param": param if param in fields else None, "code": None}}


def response_body(
    call: Call, outputs: Sequence[RequestOutput], response_id: str, model: str, created: int
) -> dict[str, Any]:
    """The response to a call whose outputs, one for each prompt, are finished. response_id: without the endpoint's
    prefix. model: the name for a body that gives none. created: Unix time in seconds."""
    n = call.params.n
    choices = [
        _choice(call, output, completion, i * n + completion.index)
        for i, output in enumerate(outputs)
        for completion in output.outputs
    ]
    body: dict[str, Any] = {
        "id": ("chatcmpl-" if call.chat else "cmpl-") + response_id,
        "object": "chat.completion" if call.chat else "text_completion",
        "created": created,
        "model": call.model or model,
        "choices": choices,
        "usage": usage(outputs),
    }
    if call.chat and outputs[0].prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs(outputs[0].prompt_logprobs)
    return body


def _choice(call: Call, output: RequestOutput, completion: CompletionOutput, index: int) -> dict[str, Any]:
    top = call.params.logprobs
    ended = {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
    if call.chat:
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        content = None if completion.logprobs is None else chat_logprobs(completion.logprobs, top or 0)
        logprobs = None if content is None else {"content": content, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, **ended}
    given = None if completion.logprobs is None else completion_logprobs(completion.logprobs)
    choice: dict[str, Any] = {"index": index, "text": completion.text, "logprobs": given, **ended}
    if output.prompt_logprobs is not None:
        choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
    return choice


def usage(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """Tokens of a response's prompts and completions."""
    prompt = completion = cached = 0
    for output in outputs:
        prompt += len(output.prompt_token_ids)
        cached += output.num_cached_tokens
        completion += sum(len(c.token_ids) for c in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def chat_logprobs(positions: Iterable[Position], top: int) -> list[dict[str, Any]]:
    """Log-probabilities in a chat's form. top: the likeliest tokens listed for each, -1 for all."""
    found = []
    for position in positions:
        # The token that was taken stands first, wherever it ranks.
        likeliest = sorted(position.values(), key=lambda entry: entry.rank or 0)
        listed = likeliest if top < 0 else [e for e in likeliest if (e.rank or 0) <= top][:top]
        taken = next(iter(position.values()))
        found.append({**_token(taken), "top_logprobs": [_token(entry) for entry in listed]})
    return found


def _token(entry: Logprob) -> dict[str, Any]:
    text = entry.decoded_token or ""
    return {"token": text, "logprob": max(entry.logprob, _LOWEST), "bytes": list(text.encode())}


def completion_logprobs(positions: Iterable[Position]) -> dict[str, Any]:
    """Log-probabilities in a completion's form."""
    found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    offset = 0
    for position in positions:
        taken = next(iter(position.values()))
        top: dict[str, float] = {}
        for entry in position.values():  # tokens that are parts of a character may have the same text; the first stays
            top.setdefault(entry.decoded_token or "", max(entry.logprob, _LOWEST))
        text = taken.decoded_token or ""
        values = (offset, max(taken.logprob, _LOWEST), text, top)
        for name, value in zip(found, values, strict=True):
            found[name].append(value)
        offset += len(text)
    return found


def prompt_logprobs(positions: Iterable[Position | None]) -> list[dict[str, Any] | None]:
    """vLLM's extra field: by token id, for each token of the prompt; None for the first."""
    return [
        None
        if position is None
        else {str(i): {**e._asdict(), "logprob": max(e.logprob, _LOWEST)} for i, e in position.items()}
        for position in positions
    ]


def failure(outputs: Iterable[RequestOutput]) -> str | None:
    """What went wrong in the engine with the first completion that has finish_reason "error"."""
    broken = (c for output in outputs for c in output.outputs if c.finish_reason == "error")
    return next((c.error or "the engine could not go on with it" for c in broken), None)
