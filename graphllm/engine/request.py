"""What crosses between the front (text, HTTP) and the engine core (token ids): requests in, updates out.

Plain data that msgspec writes to a socket; in one process the same objects are passed directly.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from graphllm.engine.params import SamplingParams


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate; a user's request with ``n`` completions becomes n of these.

    prompt: token ids, at least one. stop_ids: tokens that end it. limit: output tokens at most. seed: of its random
    draws. priority: lower goes first. cache_salt: only requests with the same salt share prefix-cache pages. fork_of:
    id of the sibling with the same prompt that computes it ("" for none). bad_words: token sequences that must not
    appear. arrival: seconds, `time.monotonic` of the machine.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    stop_ids: list[int]
    limit: int
    seed: int
    priority: int = 0
    cache_salt: str = ""
    fork_of: str = ""
    bad_words: list[list[int]] = []
    arrival: float = 0.0


class Ranked(msgspec.Struct, array_like=True):
    """Log-probabilities at one position, of the model's own distribution (before temperature, penalties and masks).

    rank: 1 for the likeliest. top_ids, top_logprobs: the likeliest tokens, best first, as many as were asked for.
    """

    token: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class Update(msgspec.Struct):
    """News of one sequence from one step.

    tokens: the new ones. finish_reason: "stop", "length", "abort" or "error" with its last update. stop_reason: the
    token of stop_ids that ended it, None for an end-of-sequence token. error: what went wrong, for people. logprobs:
    one entry for each new token, when asked for. prompt_logprobs: one entry for each prompt token but the first, once.
    cached: prompt tokens that the prefix cache held.
    """

    id: str
    tokens: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    logprobs: list[Ranked] | None = None
    prompt_logprobs: list[Ranked] | None = None
    cached: int = 0


class CoreInfo(msgspec.Struct, frozen=True):
    """What the front must know of a core to check requests.

    max_model_len: tokens of prompt and output together. capacity: tokens of the longest sequence that the cache holds.
    """

    max_model_len: int
    vocab: int
    max_num_seqs: int
    max_num_tokens: int
    page_size: int
    kv_pages: int
    capacity: int
    max_logprobs: int
    max_logit_bias: int
    device: str


class CoreStats(msgspec.Struct):
    """Gauges and counters of a core; counters only grow.

    steps: steps launched. kv_usage: share of the pages that running requests hold. prefix_queries, prefix_hits:
    prompt tokens looked up in and found in the prefix cache. free_pages: pages nobody holds (cached ones included).
    """

    steps: int = 0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    free_pages: int = 0
    total_pages: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: dict[str, int] = {}


class Core(Protocol):
    """What drives an engine core needs of it: `graphllm.engine.core.EngineCore` is the real one."""

    @property
    def info(self) -> CoreInfo: ...
    @property
    def unfinished(self) -> int: ...
    def add(self, request: EngineRequest) -> None: ...
    def abort(self, ids: Iterable[str]) -> None: ...
    def step(self) -> list[Update]: ...
    def stats(self) -> CoreStats: ...
    def reset_prefix_cache(self) -> bool: ...
    def close(self) -> None: ...
