"""From a prompt and its sampling parameters to engine requests: tokens, limits, and every check the front can make.

A request that passes here runs. A core checks only what nobody else knows, such as a full queue.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NotRequired, Protocol, TypedDict, Unpack

from graphllm.config import ConfigError
from graphllm.config.requests.pooling_params import NO_POOLING, PoolingParams
from graphllm.config.requests.sampling_params import SamplingParams, StructuredOutputsParams
from graphllm.engine.requests.request import Adapter, CoreInfo, EngineRequest, ThinkingBudget
from graphllm.engine.requests.text import Tokenizer
from graphllm.engine.requests.text_length import encode_at_most

_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt", "add_special_tokens", "truncation", "thinking"}
_TRUNCATED = 1 << 16  # tokens of a prompt that is truncated, or twice the context where that is more
_ONE_TOKEN, _UNUSED = SamplingParams(max_tokens=1), SamplingParams()  # for requests of vectors
_BAD_WORDS, _BAD_WORDS_LENGTH = 1024, 64 << 10  # how many, and characters of all together
Prompt = str | Sequence[int] | Mapping[str, Any]


class TextPrompt(TypedDict):
    """A prompt as text. add_special_tokens: False for a text that has them."""

    prompt: str
    cache_salt: NotRequired[str]
    add_special_tokens: NotRequired[bool]


class TokensPrompt(TypedDict):
    """A prompt as token ids. prompt: its text, for the output."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


class GrammarChecker(Protocol):
    """Says whether a constraint can be used (`graphllm.engine.structured.compilers.GrammarCompilers`)."""

    def check(self, spec: StructuredOutputsParams) -> None:
        """Raises ConfigError when it cannot."""


class Truncation(NamedTuple):
    """How many tokens of a prompt are kept, -1 for as many as leave room for the output, and on which side it is
    cut. What a tokenizer puts around a text stays."""

    tokens: int
    side: str = "left"

    def cut(self, ids: Sequence[int], room: int, around: tuple[int, int]) -> list[int]:
        """The prompt within the limit.

        room: tokens of a prompt at most.
        around: tokens that the tokenizer has put before and after the text.
        """
        keep = room if self.tokens == -1 else self.tokens
        if keep > room:
            raise ConfigError(f"truncate_prompt_tokens is {keep}: there is room for {room}; give no more, or -1")
        before, after = around if sum(around) < keep else (0, 0)
        end = len(ids) - after
        if len(ids) <= keep:
            return list(ids)
        left = keep - before - after
        middle = ids[end - left : end] if self.side == "left" else ids[before : before + left]
        return [*ids[:before], *middle, *ids[end:]]


class ParsedRequest(NamedTuple):
    """A checked request.

    prompt: its text, None when it came as tokens.
    requests: one for each completion.
    eos_ids: stop ids that end an output without being a stop_reason.
    thinking: whether the output begins within `<think>` tags; None without tags. Stop strings apply to the answer only.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    requests: list[EngineRequest]
    eos_ids: frozenset[int]
    thinking: bool | None = None


class RequestOptions(TypedDict, total=False):
    """What may be said of a request besides its prompt and parameters; see `EngineRequest`."""

    priority: int
    cache_salt: str | None
    adapter: Adapter | None


class Processor:
    """Makes requests for one core.

    tokenizer: None takes token ids only.
    grammar: None refuses structured outputs.
    seed: makes the seeds of requests without one repeatable.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        info: CoreInfo,
        grammar: GrammarChecker | None = None,
        seed: int | None = None,
    ) -> None:
        self._tokenizer, self._info, self._grammar = tokenizer, info, grammar
        self._random: random.Random = random.Random(seed) if seed is not None else secrets.SystemRandom()
        self._output = 0 if info.task == "pool" else 1  # tokens of it that a prompt leaves room for
        # Of a vocabulary that is larger than the model's, the rest never comes.
        self._eos = frozenset(i for i in tokenizer.stop_ids if i < info.vocab) if tokenizer else frozenset[int]()

    def make(
        self, prompt: Prompt, params: SamplingParams, request_id: str, **options: Unpack[RequestOptions]
    ) -> ParsedRequest:
        """Check a request and split it into its completions.

        prompt: text, token ids, or a mapping with ``prompt`` and/or ``prompt_token_ids`` (which is used when there are
        both), and maybe ``cache_salt``, ``truncation``, ``add_special_tokens``, False for a text that has them, and
        ``thinking``, as in `ParsedRequest`.
        Completions are named ``request_id``, or ``0_request_id`` and so on when there are several. Raises ConfigError
        naming field, value and remedy.
        """
        if not isinstance(params, SamplingParams):
            why = NO_POOLING if isinstance(params, PoolingParams) else "give SamplingParams"
            raise ConfigError(f"params is {params!r:.80}: {why}")
        if self._info.task != "generate":
            raise ConfigError("the model gives vectors and generates no text; use embed, classify, score or encode")
        text, ids, salt = self._prompt(prompt, params)
        limit = self._limit(len(ids), params)
        self._check_counts(params)
        self._check_ids(params)
        self._check_bad_words(params.bad_words)
        if params.stop and self._tokenizer is None:
            raise ConfigError(
                f"stop is {params.stop!r:.80}: there is no tokenizer to find it with; give stop_token_ids"
            )
        if params.structured_outputs is not None:
            if self._grammar is None:
                raise ConfigError("structured_outputs: not available without a tokenizer; leave it out")
            self._grammar.check(params.structured_outputs)
        if params.skip_reading_prefix_cache is None and params.prompt_logprobs is not None:
            params = replace(params, skip_reading_prefix_cache=True)
        eos = frozenset[int]() if params.ignore_eos else self._eos
        seed = params.seed if params.seed is not None else self._random.getrandbits(63)
        names = [f"{i}_{request_id}" for i in range(params.n)] if params.n > 1 else [request_id]
        common: dict[str, Any] = {
            "prompt": ids,
            "params": params,
            "stop_ids": sorted(eos.union(params.stop_token_ids)),
            "limit": limit,
            "arrival": time.monotonic(),
            "thinking": self._thinking(ids, params),
            **options,
            "cache_salt": options.get("cache_salt") or salt,
        }
        requests = [
            EngineRequest(id=name, seed=_int64(seed + i), fork_of=names[0] if i else "", **common)
            for i, name in enumerate(names)
        ]
        thinking = prompt.get("thinking") if isinstance(prompt, Mapping) else None
        return ParsedRequest(request_id, text, ids, params, requests, eos, thinking)

    def make_pooling(
        self, prompt: Prompt, request_id: str, priority: int, cache_salt: str | None, adapter: Adapter | None = None
    ) -> EngineRequest:
        """Check a request for a vector; the prompt is as in `make`. Raises ConfigError naming field, value and
        remedy."""
        _, ids, salt = self._prompt(prompt, _ONE_TOKEN)
        if len(ids) > self._info.capacity:
            raise ConfigError(
                f"prompt has {len(ids)} tokens: the cache holds {self._info.capacity}; shorten it, or raise "
                "--kv-cache-memory-bytes"
            )
        return EngineRequest(
            id=request_id, prompt=ids, params=_UNUSED, stop_ids=[], limit=0, seed=0, priority=priority,
            cache_salt=cache_salt or salt, arrival=time.monotonic(), adapter=adapter,
        )  # fmt: skip

    def encode(self, text: str, add_special_tokens: bool = True, truncated: bool = False) -> Iterator[list[int] | None]:
        """The token ids of a prompt, as `encode_at_most` gives them for the context. truncated: it will be."""
        if self._tokenizer is None:
            raise ConfigError("prompt is text and there is no tokenizer; give prompt_token_ids")
        most = self._info.max_model_len
        limit = max(2 * most, _TRUNCATED) if truncated else most - self._output
        return encode_at_most(self._tokenizer, text, limit, add_special_tokens)

    def _around(self) -> tuple[int, int]:
        """How many tokens the tokenizer puts before and after a text."""
        assert self._tokenizer is not None
        plain, whole = (self._tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
        at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        return at, len(whole) - at - len(plain)

    def _prompt(self, prompt: Prompt, params: SamplingParams) -> tuple[str | None, list[int], str]:
        """Text if there is any, token ids, cache salt."""
        fields = prompt if isinstance(prompt, Mapping) else {}
        if fields.keys() - _PROMPT_KEYS:
            raise ConfigError(f"prompt has {sorted(fields.keys() - _PROMPT_KEYS)}: give {sorted(_PROMPT_KEYS)}")
        if isinstance(prompt, Mapping):
            text, ids = fields.get("prompt"), fields.get("prompt_token_ids")
        else:
            text, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        if text is not None and not isinstance(text, str):
            raise ConfigError(f"prompt is {text!r:.80}: give text, or token ids as prompt_token_ids")
        if ids is None:
            if text is None:
                raise ConfigError("prompt is missing: give text, or token ids as prompt_token_ids")
            *_, ids = self.encode(text, fields.get("add_special_tokens", True), "truncation" in fields)
        if "truncation" in fields:
            around = self._around() if text is not None and fields.get("add_special_tokens", True) else (0, 0)
            ids = fields["truncation"].cut(
                ids, self._info.max_model_len - (params.max_tokens or 1) * self._output, around
            )
        return text, self._checked(ids), str(fields.get("cache_salt") or "")

    def _checked(self, ids: Any) -> list[int]:
        if not isinstance(ids, Sequence) or isinstance(ids, str):
            raise ConfigError(f"prompt is {ids!r:.80}: give text or a list of token ids")
        if not ids:
            raise ConfigError("prompt is empty: give at least one token")
        if len(ids) + self._output > self._info.max_model_len:
            output = " with at least one of output" if self._output else ""
            raise ConfigError(
                f"prompt has {len(ids)} tokens: the context holds {self._info.max_model_len}{output}; shorten it, or "
                "compile with a larger --max-model-len"
            )
        if set(map(type, ids)) != {int}:
            raise ConfigError(f"prompt is {ids!r:.80}: give text or a list of token ids")
        self._check_vocabulary("prompt", ids)
        return list(ids)

    def _limit(self, prompt: int, params: SamplingParams) -> int:
        """Output tokens at most."""
        room, capacity = self._info.max_model_len - prompt, self._info.capacity - prompt
        if params.max_tokens is None:
            room = min(room, capacity)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        if limit > capacity or limit < 1:
            raise ConfigError(
                f"max_tokens is {params.max_tokens}: {prompt} prompt tokens and {max(limit, 1)} of output are more "
                f"than the {self._info.capacity} that the cache holds; lower max_tokens, shorten the prompt, or raise "
                "--kv-cache-memory-bytes"
            )
        if params.min_tokens > limit:
            raise ConfigError(f"min_tokens is {params.min_tokens}: there is room for {limit} after this prompt")
        return limit

    def _check_counts(self, params: SamplingParams) -> None:
        for name, wanted in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if wanted is not None and wanted > self._info.max_logprobs:
                raise ConfigError(
                    f"{name} is {wanted}: give at most {self._info.max_logprobs}, or -1 for the whole vocabulary"
                )
        most = self._info.max_logit_bias
        if params.logit_bias is not None and len(params.logit_bias) > most:
            raise ConfigError(f"logit_bias has {len(params.logit_bias)} entries: give at most {most}")

    def _check_ids(self, params: SamplingParams) -> None:
        self._check_vocabulary("stop_token_ids", params.stop_token_ids)
        self._check_vocabulary("logit_bias", list(params.logit_bias or ()))
        self._check_vocabulary("allowed_token_ids", params.allowed_token_ids or ())
        self._check_vocabulary("logprob_token_ids", params.logprob_token_ids or ())

    def _check_vocabulary(self, field: str, ids: Sequence[int]) -> None:
        check_vocabulary(field, ids, self._info.vocab)

    def _thinking(self, prompt: Sequence[int], params: SamplingParams) -> ThinkingBudget | None:
        budget = params.thinking_token_budget
        if budget is None:
            return None
        if self._tokenizer is None:
            raise ConfigError(f"thinking_token_budget is {budget}: there is no tokenizer; leave it out")
        tags = [self._tokenizer.encode(tag, add_special_tokens=False) for tag in ("<think>", "</think>")]
        if any(len(tag) != 1 for tag in tags):
            raise ConfigError(
                f"thinking_token_budget is {budget}: the model has no tokens <think> and </think>; give max_tokens"
            )
        (start,), (end,) = tags
        last = next((i for i in reversed(prompt) if i in (start, end)), end)
        begun = last == start
        if params.structured_outputs is not None and not begun:  # a grammar leaves no place for thinking to begin in
            return None
        return ThinkingBudget(budget, start, end, begun)

    def _check_bad_words(self, words: Sequence[str]) -> None:
        if words and self._tokenizer is None:
            raise ConfigError(f"bad_words is {words!r:.80}: there is no tokenizer; leave it out")
        count, length = len(words), sum(map(len, words))
        if count > _BAD_WORDS or length > _BAD_WORDS_LENGTH:
            raise ConfigError(
                f"bad_words has {count} entries of {length} characters together: give at most {_BAD_WORDS} of "
                f"{_BAD_WORDS_LENGTH}"
            )


def check_vocabulary(field: str, ids: Sequence[int], vocab: int) -> None:
    """Raises ConfigError naming the field and the first token id that a vocabulary of this size does not have."""
    if ids and (min(ids) < 0 or max(ids) >= vocab):
        wrong = next(i for i in ids if not 0 <= i < vocab)
        raise ConfigError(f"{field} has token id {wrong}: give ids from 0 to {vocab - 1}")


def _int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
