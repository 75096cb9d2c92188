"""Answers of OpenAI's API, /v1/chat/completions and /v1/completions: outputs of the engine become the body of a
response or the chunks of a stream. Plain JSON objects, for batch files and the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from graphllm.chat.call import Call
from graphllm.chat.logprobs import LOWEST, named, of_completion
from graphllm.chat.reading import Count, add_usage, finish_reason, parts_of, reader_of, usage_of
from graphllm.chat.replies import CallArguments, CallStart, Part, Reasoning, ReplyReader, Text, Usage, merged
from graphllm.engine.requests.outputs import CompletionOutput, Position, RequestOutput


def response_body(
    call: Call, outputs: Sequence[RequestOutput], response_id: str, model: str, created: int, count: Count | None = None
) -> dict[str, Any]:
    """The response to a call. outputs: finished, one for each prompt. response_id: without the endpoint's
    prefix. model: the name for a body that gives none. created: Unix time in seconds. count: for the tokens of
    reasoning, which are 0 without it."""
    choices = []
    reasoning = 0
    for i, output in enumerate(outputs):
        for completion in output.outputs:
            choice, thoughts = _choice(call, output, completion, i * call.params.n + completion.index)
            choices.append(choice)
            reasoning += count(thoughts) if count and thoughts else 0
    used = add_usage(usage_of(call, output) for output in outputs)
    body: dict[str, Any] = {
        "id": ("chatcmpl-" if call.chat else "cmpl-") + response_id,
        "object": "chat.completion" if call.chat else "text_completion",
        "created": created,
        "model": call.model or model,
        "choices": choices,
        "usage": usage_body(used._replace(reasoning=reasoning), call.reply.reasoning),
    }
    if call.chat:
        body |= _of_prompt(call, outputs[0])
    if (params := outputs[0].kv_transfer_params) is not None:
        body["kv_transfer_params"] = params
    return body


def _of_prompt(call: Call, output: RequestOutput) -> dict[str, Any]:
    """What was asked for of a prompt: log-probabilities, token ids, text."""
    found: dict[str, Any] = {}
    if output.prompt_logprobs is not None:
        found["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
    if call.token_ids:
        found["prompt_token_ids"] = output.prompt_token_ids
    if call.prompt_text:
        found["prompt_text"] = output.prompt
    return found


def _tokens(call: Call, completion: CompletionOutput) -> dict[str, Any]:
    """Token ids, where they were asked for."""
    return {"token_ids": [] if call.echo_only else completion.token_ids} if call.token_ids else {}


def _choice(call: Call, output: RequestOutput, completion: CompletionOutput, index: int) -> tuple[dict[str, Any], str]:
    """A choice, and the reasoning in it."""
    ended = {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
    if not call.chat:
        text, logprobs = completion.text, named(call, completion.logprobs)
        if call.echo_only:
            text, logprobs, ended["finish_reason"] = "", None if logprobs is None else [], "length"
        given = None if logprobs is None else completion_logprobs(logprobs)
        if call.echo:
            text = (output.prompt or "") + text
            given = None if logprobs is None else _with_prompt(call, output, logprobs)
        choice = {"index": index, "text": text, "logprobs": given, **ended, **_tokens(call, completion)}
        return choice | _of_prompt(call, output), ""
    reader = reader_of(call)
    reply = merged(parts_of(completion, reader))
    # Text that is all calls is null, as OpenAI has it.
    message: dict[str, Any] = {
        "role": call.role,
        "content": call.prefix + reply.text or (None if reply.calls else ""),
        "refusal": None,
    }
    if reply.calls:
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in reply.calls
        ]
        ended["finish_reason"] = finish_reason(completion, reader)
    if reply.reasoning and call.reasoning:
        message |= {"reasoning_content": reply.reasoning, "reasoning": reply.reasoning}
    whole = {"index": index, "message": message, "logprobs": _chat_logprobs(call, completion), **ended}
    return whole | _tokens(call, completion), reply.reasoning


def _chat_logprobs(call: Call, completion: CompletionOutput) -> dict[str, Any] | None:
    content = of_completion(call, completion)
    return None if content is None else {"content": content, "refusal": None}


class ChunkWriter:
    """The chunks of a streamed answer, from outputs of kind DELTA. For the arguments see `response_body`."""

    def __init__(self, call: Call, response_id: str, model: str, created: int, count: Count | None = None) -> None:
        self._call, self._count = call, count
        self._head = {
            "id": ("chatcmpl-" if call.chat else "cmpl-") + response_id,
            "object": "chat.completion.chunk" if call.chat else "text_completion",
            "created": created,
            "model": call.model or model,
        }
        self._readers: dict[int, ReplyReader] = {}
        self._begun: set[int] = set()  # choices of text
        self._used: dict[int, Usage] = {}  # by prompt
        self._thoughts: dict[int, list[str]] = {}  # of each choice that goes on
        self._reasoning = 0  # tokens, of choices that have ended
        self._prompts: dict[int, list[Position | None]] = {}  # their log-probabilities, which come only once
        self._started: set[int] = set()  # prompts with a first chunk

    def write(self, prompt: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The chunks of what is new. prompt: its number, of several."""
        tokens = sum(len(c.token_ids) for c in output.outputs)
        before = self._used.get(prompt, Usage(len(output.prompt_token_ids), 0))
        self._used[prompt] = before._replace(
            completion=before.completion + (0 if self._call.echo_only else tokens), cached=output.num_cached_tokens
        )
        if output.prompt_logprobs is not None:
            self._prompts[prompt] = output.prompt_logprobs
        elif prompt in self._prompts:
            output = replace(output, prompt_logprobs=self._prompts[prompt])
        chunks = []
        for completion in output.outputs:
            index = prompt * self._call.params.n + completion.index
            choices = self._chat(index, completion) if self._call.chat else self._text(index, output, completion)
            chunks += [self._chunk([choice]) for choice in choices]
        if self._call.chat and chunks and prompt not in self._started:
            self._started.add(prompt)
            chunks[0] |= _of_prompt(self._call, output)
            self._prompts.pop(prompt, None)
        return chunks

    def last(self) -> list[dict[str, Any]]:
        """What comes after all choices have ended."""
        return [{**self._head, "choices": [], "usage": self._usage()}] if self._call.usage else []

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk: dict[str, Any] = {**self._head, "choices": choices}
        if self._call.usage:
            chunk["usage"] = self._usage() if self._call.running_usage else None
        return chunk

    def _usage(self) -> dict[str, Any]:
        used = add_usage(self._used.values())
        return usage_body(used._replace(reasoning=self._reasoning), self._call.reply.reasoning)

    def _chat(self, index: int, completion: CompletionOutput) -> list[dict[str, Any]]:
        call, begins = self._call, index not in self._readers
        if begins:
            self._readers[index] = reader_of(call)
        reader = self._readers[index]
        parts = parts_of(completion, reader)
        self._think(index, parts, completion.finished())
        deltas = [_delta(part) for part in parts if call.reasoning or not isinstance(part, Reasoning)]
        content, tokens = _chat_logprobs(call, completion), _tokens(call, completion)
        if content is not None or tokens.get("token_ids"):
            deltas = deltas or [{"content": ""}]  # the text is held back, these are not
        if completion.finished() and not deltas:
            deltas = [{}]
        choices: list[dict[str, Any]] = [
            # All tokens of an output have their log-probabilities in the first of its chunks.
            {"index": index, "delta": delta, "logprobs": content if i == 0 else None, "finish_reason": None}
            for i, delta in enumerate(deltas)
        ]
        if choices:
            choices[0] |= tokens
        if begins:
            # Clients take log-probabilities in a choice's first chunk twice.
            role = {"role": call.role, "content": call.prefix}
            choices.insert(0, {"index": index, "delta": role, "logprobs": None, "finish_reason": None})
        if completion.finished():
            choices[-1] |= {"finish_reason": finish_reason(completion, reader), "stop_reason": completion.stop_reason}
        return choices

    def _think(self, index: int, parts: Iterable[Part], ended: bool) -> None:
        """Count the tokens of reasoning, once it is whole: pieces of a text may have more."""
        pieces = self._thoughts.setdefault(index, [])
        pieces += [part.text for part in parts if isinstance(part, Reasoning)]
        if ended and self._thoughts.pop(index) and self._count is not None:
            self._reasoning += self._count("".join(pieces))

    def _text(self, index: int, output: RequestOutput, completion: CompletionOutput) -> list[dict[str, Any]]:
        call, begins = self._call, index not in self._begun
        text = "" if call.echo_only else completion.text
        positions = named(call, completion.logprobs)
        tokens = _tokens(call, completion)
        if positions and call.echo_only:
            positions = []
        if not (text or positions or completion.finished() or tokens.get("token_ids") or (call.echo and begins)):
            return []
        self._begun.add(index)
        before = len(output.prompt or "") if call.echo else 0
        logprobs = None if positions is None else completion_logprobs(positions, before)
        if call.echo and begins:
            text = (output.prompt or "") + text
            logprobs = None if positions is None else _with_prompt(call, output, positions)
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None, **tokens}
        if begins:
            choice |= _of_prompt(call, output)
        if completion.finished():
            reason = "length" if call.echo_only else completion.finish_reason
            choice |= {"finish_reason": reason, "stop_reason": completion.stop_reason}
        return [choice]


def _delta(part: Part) -> dict[str, Any]:
    match part:
        case Text(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallStart(index, id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def usage_body(used: Usage, reasoning: bool = False) -> dict[str, Any]:
    """The usage block. reasoning: the model is known to think."""
    body: dict[str, Any] = {
        "prompt_tokens": used.prompt,
        "completion_tokens": used.completion,
        "total_tokens": used.prompt + used.completion,
        "prompt_tokens_details": {"cached_tokens": used.cached},
    }
    return body | ({"completion_tokens_details": {"reasoning_tokens": used.reasoning}} if reasoning else {})


def _with_prompt(call: Call, output: RequestOutput, positions: Iterable[Position]) -> dict[str, Any]:
    """Log-probabilities of a prompt and what follows it. The prompt's first token has none."""
    prompt, others = output.prompt or "", [p for p in output.prompt_logprobs or () if p is not None]
    second = next(iter(others[0].values())).offset if others else len(prompt)
    first = f"token_id:{output.prompt_token_ids[0]}" if call.tokens_as_ids else prompt[:second]
    parts = [
        {"text_offset": [0], "token_logprobs": [None], "tokens": [first], "top_logprobs": [None]},
        completion_logprobs(named(call, others) or []),
        completion_logprobs(positions, len(prompt)),
    ]
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def completion_logprobs(positions: Iterable[Position], before: int = 0) -> dict[str, Any]:
    """Log-probabilities in a completion's form. before: characters of text before them."""
    found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for position in positions:
        taken = next(iter(position.values()))
        top: dict[str, float] = {}
        for entry in position.values():  # tokens that are parts of a character may have the same text; the first stays
            top.setdefault(entry.decoded_token or "", max(entry.logprob, LOWEST))
        values = (before + (taken.offset or 0), max(taken.logprob, LOWEST), taken.decoded_token or "", top)
        for name, value in zip(found, values, strict=True):
            found[name].append(value)
    return found


def prompt_logprobs(positions: Iterable[Position | None]) -> list[dict[str, Any] | None]:
    """vLLM's extra field: by token id, for each token of the prompt; None for the first."""
    return [
        None
        if position is None
        else {
            str(i): {"logprob": max(e.logprob, LOWEST), "rank": e.rank, "decoded_token": e.decoded_token}
            for i, e in position.items()
        }
        for position in positions
    ]
