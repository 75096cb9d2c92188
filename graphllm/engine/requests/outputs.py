"""From the core's updates to what a user sees: text, stop strings, log-probabilities, n completions as one request.

`OutputProcessor` belongs to the driver of a core: `LLM` in the same process, `AsyncLLM` in the front's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import msgspec

from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import RepetitionDetectionParams, RequestOutputKind
from graphllm.engine.requests.answer_start import AnswerStart
from graphllm.engine.requests.detokenizer import Detokenizer
from graphllm.engine.requests.processor import ParsedRequest
from graphllm.engine.requests.request import EngineCoreOutput, PositionLogprobs
from graphllm.engine.requests.text import Tokenizer


class Logprob(NamedTuple):
    """Natural logarithm of a token's probability.

    rank: 1 for the likeliest.
    decoded_token: the text of the single token.
    token_bytes: its bytes, also within a character.
    offset: characters before it in the text of the prompt or of the output, for a token that stands there.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None
    token_bytes: bytes | None = None
    offset: int | None = None


Position = dict[int, Logprob]  # by token id: the token that stands there first, then the likeliest, best first


@dataclass(slots=True)
class CompletionOutput:
    """One completion.

    finish_reason: "stop", "length", "repetition", "abort", "error", or None while it runs.
    stop_reason: the stop string or the id of stop_token_ids that ended it, None for an end-of-sequence token.
    cumulative_logprob: of all its tokens, where logprobs were asked for.
    error: what went wrong, for people.
    mistake: the error is the request's own: it asks for something impossible.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[Position] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    mistake: bool = False

    def finished(self) -> bool:
        """Whether it has its end."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Seconds of `time.monotonic`; 0 for what has not happened yet.

    first_scheduled_time: when its first step was planned, known from the first token on.
    draft_tokens, accepted_tokens: drafts of its ended completions that were verified, and that became output.
    """

    arrival_time: float
    first_scheduled_time: float = 0.0
    first_token_time: float = 0.0
    last_token_time: float = 0.0
    finished_time: float = 0.0
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class RequestOutput:
    """News of one request.

    prompt: its text, None when it came as tokens.
    prompt_logprobs: None for the first token, then one entry for each.
    num_cached_tokens: prompt tokens that the prefix cache held.
    kv_transfer_params: what another engine must know to go on with it, where it was asked for that, at its end.

    outputs: with RequestOutputKind.DELTA the completions that got something, and only that; else all n of them.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Position | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None


class Processed(NamedTuple):
    """aborts: ids that the core must abort, because a stop string ended them."""

    outputs: list[RequestOutput]
    aborts: list[str]


class OutputProcessor:
    """Keeps the text side of every running request. tokenizer: None gives token ids only."""

    def __init__(self, tokenizer: Tokenizer | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokenizer, self._clock = tokenizer, clock
        self._requests: dict[str, _Request] = {}
        self._streams: dict[str, _Stream] = {}
        self._pieces = _Pieces(tokenizer)

    @property
    def unfinished(self) -> int:
        """Requests that are not done."""
        return len(self._requests)

    def add(self, parsed: ParsedRequest) -> None:
        """Expect updates of a request. Raises ConfigError when one of that id is running."""
        taken = [r.id for r in parsed.requests if r.id in self._streams]
        if parsed.request_id in self._requests or taken:
            raise ConfigError(f"request_id: {parsed.request_id!r} is already running; ids must be unique")
        request = _Request(parsed)
        self._requests[parsed.request_id] = request
        for index, part in enumerate(parsed.requests):
            stream = _Stream(request, index, self._tokenizer)
            request.streams.append(stream)
            self._streams[part.id] = stream

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Forget requests, without another output; the ids that the core must abort. Unknown ids are ignored."""
        gone = [request for id in request_ids if (request := self._requests.pop(id, None)) is not None]
        parts = [part.id for request in gone for part in request.parsed.requests]
        return [id for id in parts if self._streams.pop(id, None) is not None]

    def finish(self, request_id: str, index: int) -> Processed:
        """End one completion as a stop string does, with what it has; nothing for one that is not running."""
        request = self._requests.get(request_id)
        stream = request.streams[index] if request is not None else None
        if request is None or stream is None or stream.finish_reason is not None:
            return Processed([], [])
        stream.end()
        id = request.parsed.requests[index].id
        del self._streams[id]
        request.running -= 1
        return Processed([self._output(request, self._clock())], [id])

    def process(self, updates: Sequence[EngineCoreOutput]) -> Processed:
        """The outputs that a step's updates make, one for each request, in the order of the updates. Updates of
        requests that are done or unknown are ignored."""
        now = self._clock()
        aborts: list[str] = []
        changed: dict[int, _Request] = {}
        for update in updates:
            stream = self._streams.get(update.id)
            if stream is None:
                continue
            request = stream.request
            if update.prompt_logprobs is not None and stream.index == 0:
                request.prompt_logprobs = self._of_prompt(request.parsed, update.prompt_logprobs)
            if update.cached and stream.index == 0:
                request.cached = update.cached
            if update.scheduled and not request.metrics.first_scheduled_time:
                request.metrics.first_scheduled_time = update.scheduled
            if update.kv_transfer_params is not None and stream.index == 0:
                request.kv_transfer_params = update.kv_transfer_params
            request.metrics.draft_tokens += update.draft_tokens
            request.metrics.accepted_tokens += update.accepted_tokens
            count = stream.take(update)
            if count:
                request.metrics.last_token_time = now
                if not request.metrics.first_token_time:
                    request.metrics.first_token_time = now
            if update.logprobs is not None:
                offsets = stream.offsets or repeat(None)
                stream.add_logprobs(list(map(self._position, update.logprobs[:count], offsets)))
            if stream.finish_reason is not None:
                del self._streams[update.id]
                request.running -= 1
                if update.finish_reason is None:
                    aborts.append(update.id)
            if request.kind is not RequestOutputKind.FINAL_ONLY or not request.running:
                changed[id(request)] = request
        return Processed([self._output(request, now) for request in changed.values()], aborts)

    def _output(self, request: _Request, now: float) -> RequestOutput:
        parsed = request.parsed
        if not request.running:
            request.metrics.finished_time = now
            del self._requests[parsed.request_id]
        prompt_logprobs = request.prompt_logprobs
        if request.kind is RequestOutputKind.DELTA:
            request.prompt_logprobs = None
            outputs = [stream.delta() for stream in request.streams if stream.news]
        else:
            outputs = [stream.whole() for stream in request.streams]
        return RequestOutput(
            parsed.request_id,
            parsed.prompt,
            parsed.prompt_token_ids,
            prompt_logprobs,
            outputs,
            not request.running,
            request.metrics,
            request.cached,
            request.kv_transfer_params,
        )

    def _of_prompt(self, parsed: ParsedRequest, ranked: list[PositionLogprobs]) -> list[Position | None]:
        tokenizer, ids = self._tokenizer, parsed.prompt_token_ids
        offsets = repeat(None) if tokenizer is None else tokenizer.text_offsets(ids, parsed.prompt)[1:]
        return [None, *map(self._position, ranked, offsets)]

    def _position(self, ranked: PositionLogprobs, offset: int | None) -> Position:
        piece = self._pieces.__getitem__
        own = Logprob(ranked.logprob, ranked.rank, *piece(ranked.token), offset)
        best = zip(ranked.top_ids, ranked.top_logprobs, range(1, len(ranked.top_ids) + 1), strict=True)
        found = {ranked.token: own, **{token: Logprob(logprob, rank, *piece(token)) for token, logprob, rank in best}}
        for token, logprob, rank in ranked.named:
            found.setdefault(token, Logprob(logprob, rank, *piece(token)))
        found[ranked.token] = own  # with its own rank, which is another than its place where several are equal
        return found


class _Pieces(dict[int, tuple[str | None, bytes | None]]):
    """The text of each token by itself, and its bytes, filled as needed."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> tuple[str | None, bytes | None]:
        tokenizer = self._tokenizer
        found = (None, None) if tokenizer is None else (tokenizer.decode([token], False), tokenizer.token_bytes[token])
        self[token] = found
        return found


class _Request:
    """A user's request.

    running: completions that are not done.
    begins: first characters of its stop strings.
    """

    __slots__ = (
        "begins", "cached", "kind", "kv_transfer_params", "metrics", "parsed", "prompt_logprobs", "running", "stop_ids",
        "streams",
    )  # fmt: skip

    def __init__(self, parsed: ParsedRequest) -> None:
        self.parsed, self.kind = parsed, parsed.params.output_kind
        self.stop_ids = frozenset(parsed.requests[0].stop_ids)
        self.begins = frozenset(stop[0] for stop in parsed.params.stop)
        self.streams: list[_Stream] = []
        self.running = len(parsed.requests)
        self.prompt_logprobs: list[Position | None] | None = None
        self.cached = 0
        self.kv_transfer_params: dict[str, Any] | None = None
        self.metrics = RequestMetrics(parsed.requests[0].arrival)


class _Stream:
    """One completion as it comes.

    text: decoded so far.
    hidden: where the text has special tokens that are not shown; stop strings may name them.
    safe: where an incomplete stop string may begin; the text from here on is held back.
    answer: finds the beginning of the answer; None after it.
    sent, sent_tokens: characters and tokens that deltas gave out.
    offsets: of the last tokens, for their log-probabilities.
    deferred: the text is decoded at the end, in one go, at a seventh of the cost, since nobody reads it before.
    """

    __slots__ = (
        "answer", "deferred", "detokenizer", "error", "finish_reason", "hidden", "index", "logprob", "logprobs",
        "mistake", "news", "offsets", "params", "request", "safe", "sent", "sent_tokens", "specials", "stop_reason",
        "text", "tokenizer", "tokens",
    )  # fmt: skip

    def __init__(self, request: _Request, index: int, tokenizer: Tokenizer | None) -> None:
        self.request, self.index, self.params = request, index, request.parsed.params
        p = self.params
        self.tokenizer = tokenizer if p.detokenize else None
        joined = not (p.skip_special_tokens or p.spaces_between_special_tokens)
        whole = p.output_kind is RequestOutputKind.FINAL_ONLY and not p.stop and p.logprobs is None
        self.deferred = whole and not joined
        self.detokenizer: Detokenizer | _Joined | None = None
        self.specials: dict[int, str] = {}  # tokens that are not shown, where a stop string has one of them
        if self.tokenizer is not None and not self.deferred:
            known = self.tokenizer.special_tokens if p.stop and p.skip_special_tokens else {}
            if any(special in stop for special in known for stop in p.stop):
                self.specials = {id: special for special, id in known.items()}
            skip = p.skip_special_tokens and not self.specials
            detokenizer = self.tokenizer.detokenizer(request.parsed.prompt_token_ids, skip)
            self.detokenizer = _Joined(detokenizer, self.tokenizer) if joined else detokenizer
        self.tokens: list[int] = []
        self.text, self.safe, self.sent, self.sent_tokens = "", 0, 0, 0
        self.hidden: list[slice] = []
        self.offsets: list[int] = []
        thinking = request.parsed.thinking
        self.answer = None if thinking is None else AnswerStart(thinking)
        self.logprobs: list[Position] | None = [] if p.logprobs is not None else None
        self.logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.mistake = False
        self.news = False

    def take(self, update: EngineCoreOutput) -> int:
        """Add an update's tokens; how many of them count, which is fewer when a stop string comes before the last."""
        p = self.params
        if p.repetition_detection is not None:
            update = self._until_it_repeats(update, p.repetition_detection)
        tokens = update.tokens
        self.news = True
        shown = tokens
        if update.finish_reason is not None:
            self.finish_reason, self.error, self.mistake = update.finish_reason, update.error, update.mistake
            if update.finish_reason == "stop" and tokens and tokens[-1] in self.request.stop_ids:
                self.stop_reason = None if tokens[-1] in self.request.parsed.eos_ids else tokens[-1]
                if not p.include_stop_str_in_output:
                    shown = tokens[:-1]
        count = len(tokens)
        if self.detokenizer is not None:
            count = self._decode(tokens, len(shown), self.detokenizer)
        self.tokens += tokens[:count]
        if self.deferred and self.finish_reason is not None and self.tokenizer is not None:
            visible = self.tokens[: len(self.tokens) - len(tokens) + len(shown)]
            prompt = self.request.parsed.prompt_token_ids
            self.text = self.tokenizer.output_text(prompt, visible, p.skip_special_tokens)
        return count

    def _decode(self, tokens: Sequence[int], shown: int, detokenizer: Detokenizer | _Joined) -> int:
        """Add the text of the first ``shown`` of new tokens; how many there are up to a stop string."""
        p = self.params
        if not p.stop and self.logprobs is None:
            self.text += detokenizer.step(tokens[:shown])
        else:
            self.offsets = []
            for i, token in enumerate(tokens, 1):
                self.offsets.append(len(self.text) - sum(s.stop - s.start for s in self.hidden))
                if i <= shown and self._finds_stop(detokenizer.step((token,)), token, len(self.tokens) + i):
                    return i
        if self.finish_reason is not None:
            self._finds_stop(detokenizer.rest(), None, len(self.tokens) + len(tokens))
        return len(tokens)

    def end(self) -> None:
        """End it as a stop string does, with what it has."""
        self.finish_reason, self.news = "stop", True
        if self.detokenizer is not None:
            self.text += self.detokenizer.rest()

    def _until_it_repeats(self, update: EngineCoreOutput, how: RepetitionDetectionParams) -> EngineCoreOutput:
        """An update up to where the output repeats itself, which is its end then."""
        known = self.tokens.copy()
        for i, token in enumerate(update.tokens, 1):
            known.append(token)
            ended = i == len(update.tokens) and update.finish_reason is not None
            if len(known) > self.params.min_tokens and not ended and how.found_in(known):
                return msgspec.structs.replace(
                    update, tokens=update.tokens[:i], finish_reason="repetition", stop_reason=None, error=None
                )
        return update

    def _finds_stop(self, new: str, token: int | None, number: int) -> bool:
        """Add the text of the ``number``th token of the output; whether there is a stop string now, and it was cut."""
        p, old = self.params, len(self.text)
        text = self.text = self.text + new
        if not p.stop:
            return False
        if token is not None and (special := self.specials.get(token)) is not None:
            self.hidden.append(slice(len(text) - len(special), len(text)))
        if self.answer is not None:
            begin = self.answer.find(text)
            if begin is None:
                self.safe = len(text) if self.answer.thinking else 0
                return False
            self.safe, old, self.answer = begin, begin, None
        begins = self.request.begins
        while self.safe < len(text) and text[self.safe] not in begins:
            self.safe += 1
        if self.safe == len(text):
            return False
        if number > p.min_tokens:
            # One that ended before min_tokens were there does not count, so it must end in the new text.
            found = [
                (at, i, stop)
                for i, stop in enumerate(p.stop)
                if (at := text.find(stop, max(self.safe, old + 1 - len(stop)))) >= 0
            ]
            if found:
                at, _, stop = min(found)
                self.text = text[: at + len(stop)] if p.include_stop_str_in_output else text[:at]
                self.hidden = [span for span in self.hidden if span.stop <= at]
                self.finish_reason, self.stop_reason, self.error = "stop", stop, None
                return True
        while (rest := text[self.safe :]) and not any(stop.startswith(rest) and stop != rest for stop in p.stop):
            self.safe += 1
        return False

    def _visible(self) -> int:
        """Length of the text that no stop string can take back."""
        p = self.params
        held = p.stop and self.finish_reason is None and not p.include_stop_str_in_output
        return self.safe if held else len(self.text)

    def _shown(self, start: int, end: int) -> str:
        """That part of the text, without what is hidden."""
        pieces, at = list[str](), start
        for span in self.hidden:
            pieces.append(self.text[at : min(span.start, end)])
            at = max(at, span.stop)
        return "".join(pieces) + self.text[at:end]

    def add_logprobs(self, positions: list[Position]) -> None:
        """Log-probabilities of the tokens last taken."""
        if self.logprobs is not None:
            self.logprobs += positions
            for position in positions:
                self.logprob += next(iter(position.values())).logprob

    def whole(self) -> CompletionOutput:
        """Everything so far."""
        logprobs = None if self.logprobs is None else self.logprobs.copy()
        return self._completion(self._shown(0, self._visible()), self.tokens.copy(), logprobs)

    def delta(self) -> CompletionOutput:
        """What came since the last call."""
        end, first = self._visible(), self.sent_tokens
        text, tokens = self._shown(self.sent, end), self.tokens[first:]
        logprobs = self.logprobs
        if logprobs is not None:
            self.logprobs = []  # a long stream would hold megabytes of them
        self.sent, self.sent_tokens, self.news = end, len(self.tokens), False
        return self._completion(text, tokens, logprobs)

    def _completion(self, text: str, tokens: list[int], logprobs: list[Position] | None) -> CompletionOutput:
        total = self.logprob if logprobs is not None else None
        return CompletionOutput(
            self.index, text, tokens, total, logprobs, self.finish_reason, self.stop_reason, self.error, self.mistake
        )


class _Joined:
    """A detokenizer that puts nothing between special tokens that follow each other."""

    def __init__(self, detokenizer: Detokenizer, tokenizer: Tokenizer) -> None:
        self._detokenizer, self._tokenizer = detokenizer, tokenizer
        self._after_special = False

    def step(self, ids: Iterable[int]) -> str:
        """The text that these new tokens complete."""
        return "".join(map(self._one, ids))

    def rest(self) -> str:
        """The text of tokens that wait for others."""
        return self._detokenizer.rest()

    def _one(self, token: int) -> str:
        text = self._detokenizer.step((token,))
        single = self._tokenizer.decode([token], skip_special_tokens=False)
        special = single != "" and self._tokenizer.decode([token], skip_special_tokens=True) == ""
        joined = special and self._after_special
        self._after_special = special
        return single if joined else text
