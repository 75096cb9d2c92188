"""Outputs of the engine read as replies to a call: the parts of a chat, why it ended, what it used, what went wrong."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from graphllm.chat.call import Call
from graphllm.chat.logprobs import TextLogprobs
from graphllm.chat.replies import Ending, Part, Reasoning, ReplyReader, Usage
from graphllm.engine.requests.outputs import CompletionOutput, RequestOutput

Count = Callable[[str], int]  # tokens of a text


def reader_of(call: Call) -> ReplyReader:
    """For one completion of a chat."""
    # Mistral's templates refuse longer ids when they come back.
    return ReplyReader(call.reply, (lambda: secrets.token_hex(5)[:9]) if call.reply.tools == "mistral" else _new_id)


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def parts_of(completion: CompletionOutput, reader: ReplyReader) -> list[Part]:
    """What is new in a completion of a chat."""
    parts = reader.feed(completion.text)
    if completion.finished():
        parts += reader.finish(cut=completion.finish_reason != "stop" or completion.stop_reason is not None)
    return parts


def finish_reason(completion: CompletionOutput, reader: ReplyReader) -> str | None:
    """Of a chat's completion. reader: has read its text. A client should not make a call that is not whole."""
    called = reader.called and not reader.broken and completion.finish_reason == "stop"
    return "tool_calls" if called else completion.finish_reason


def usage_of(call: Call, output: RequestOutput) -> Usage:
    """Tokens of a finished output."""
    completion = 0 if call.echo_only else sum(len(c.token_ids) for c in output.outputs)
    return Usage(len(output.prompt_token_ids), completion, output.num_cached_tokens)


def add_usage(used: Iterable[Usage]) -> Usage:
    """The sum."""
    listed = list(used)
    return Usage(*(sum(column) for column in zip(*listed, strict=True))) if listed else Usage(0, 0)


class Failure(NamedTuple):
    """What went wrong with a completion. mistake: it is the request's own."""

    message: str
    mistake: bool


def failure(outputs: Iterable[RequestOutput]) -> Failure | None:
    """Of the first completion that has finish_reason "error"."""
    broken = (c for output in outputs for c in output.outputs if c.finish_reason == "error")
    return next((Failure(c.error or "the engine could not go on with it", c.mistake) for c in broken), None)


class Reading:
    """The parts of a chat that has one choice, as its outputs come; for APIs that are no OpenAI chat."""

    def __init__(self, call: Call, count: Count) -> None:
        self._call, self._count = call, count
        self._reader, self._logprobs = reader_of(call), TextLogprobs(call)
        self._thoughts: list[str] = []
        self._used = Usage(0, 0)
        self._last: CompletionOutput | None = None

    def read(self, output: RequestOutput) -> list[Part]:
        """What is new in an output. The calls end with the reply, so their order identifies them."""
        used = usage_of(self._call, output)
        self._used = used._replace(completion=used.completion + self._used.completion)
        parts: list[Part] = []
        for completion in output.outputs:
            parts += parts_of(completion, self._reader)
            if completion.finished():
                self._last = completion
        self._thoughts += [part.text for part in parts if isinstance(part, Reasoning)]
        if self._last is not None and self._thoughts:
            # Once it is whole: pieces of a text may have more tokens.
            self._used = self._used._replace(reasoning=self._count("".join(self._thoughts)))
        return parts if self._call.reasoning else [part for part in parts if not isinstance(part, Reasoning)]

    def logprobs(self, output: RequestOutput) -> list[dict[str, Any]]:
        """Entries of the tokens of text in an output, and maybe of calls after it; none if nobody asks for them."""
        return [entry for completion in output.outputs for entry in self._logprobs.take(completion)]

    @property
    def usage(self) -> Usage:
        """So far."""
        return self._used

    @property
    def ending(self) -> Ending:
        """Once the last output was read."""
        last = self._last
        assert last is not None
        reason = finish_reason(last, self._reader) or "stop"
        reason = "half_call" if reason == "stop" and self._reader.broken else reason
        return Ending(reason, self._used, last.stop_reason, last.error)
