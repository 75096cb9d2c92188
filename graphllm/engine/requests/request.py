"""What crosses between the front (text, HTTP) and the engine core (token ids): requests in, outputs of steps out.

Plain data that msgspec writes to a socket; in one process the same objects are passed directly.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.runtime.commands.calls import Call
from graphllm.weights.adapters.adapted import AdaptedLinear

# Upper bounds of a step's seconds and of its tokens, for their distributions.
STEP_SECONDS = (
    0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05,
    0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10,
)  # fmt: skip
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class QueueFullError(ConfigError):
    """The queue of waiting requests is full; send the request again later. retry_after: seconds to wait."""

    retry_after = 1


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """An input that an encoder graph turns into ``length`` rows, such as an image.

    content_hash: hex; items with equal hashes have equal rows, which are kept and shared.
    position: the first prompt token that the rows replace; -1 where every token sees them (cross-attention).
    length: rows.
    data: bytes of the encoder's input, an array.
    dtype: of the data, by numpy's name.
    shape: of the data.
    """

    content_hash: str
    position: int
    length: int
    data: bytes = b""
    dtype: str = ""
    shape: tuple[int, ...] = ()


class ThinkingBudget(msgspec.Struct, frozen=True):
    """How long a sequence may think.

    tokens: at most.
    start, end: the tokens of the tags.
    begun: the prompt ends within the thinking.
    """

    tokens: int
    start: int
    end: int
    begun: bool

    def forced(self, output: Sequence[int]) -> int | None:
        """The token that must come next; None where any may."""
        if not self.goes_on(output):
            return None
        begin = 0 if self.begun else output.index(self.start) + 1
        return self.end if len(output) - begin >= self.tokens else None

    def goes_on(self, output: Sequence[int]) -> bool:
        """Whether the sequence thinks; once only, so tags in what follows mean nothing."""
        if self.begun:
            return self.end not in output
        return self.start in output and self.end not in output[output.index(self.start) :]


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter.

    name: the user's name for it.
    folder: of its files, in PEFT's format.
    digest: of all that its results depend on; the prefix cache and the tables of adapters use it in every process.
    """

    name: str
    folder: str
    digest: str


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate; a user's request with ``n`` completions becomes n of these.

    id: unique among the core's requests.
    prompt: token ids, at least one.
    params: sampling parameters.
    stop_ids: tokens that end it.
    limit: output tokens at most; 0 ends it with its prompt computed and no token.
    seed: of its random draws.
    priority: lower goes first.
    cache_salt: only requests with the same salt share blocks of the prefix cache.
    fork_of: id of the sibling with the same prompt that computes it ("" for none).
    arrival: seconds, `time.monotonic` of the machine.
    adapter: the LoRA adapter, None for none.
    items: encoded inputs.
    thinking: how long it may think; structured outputs hold from the end of thinking on.
    second: for a cross-encoder, the place of the first token of the second text; 0 with one text.
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
    arrival: float = 0.0
    adapter: Adapter | None = None
    items: list[Item] = []
    thinking: ThinkingBudget | None = None
    second: int = 0


class PositionLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position, of the model's own distribution (before temperature, penalties and masks).

    rank: 1 for the likeliest.
    top_ids, top_logprobs: the likeliest tokens, best first, in the requested number.
    named: (token, log-probability, rank) of tokens that were asked for by their ids.
    """

    token: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]
    named: list[tuple[int, float, int]] = []


class EngineCoreOutput(msgspec.Struct, omit_defaults=True):
    """News of one sequence from one step.

    tokens: the new tokens.
    finish_reason: "stop", "length", "abort" or "error", with the last update.
    stop_reason: the token of stop_ids that ended it, None for an end-of-sequence token.
    error: what went wrong, for people.
    mistake: the error is the request's own: it asks for something impossible.
    logprobs: one entry for each new token, when asked for.
    prompt_logprobs: one entry for each prompt token but the first, once.
    cached: prompt tokens that the prefix cache held.
    scheduled: seconds of `time.monotonic` when its first step was planned, with the first update; 0 in the others.
    pooled: float32 numbers: one vector, or one for each token of the prompt.
    draft_tokens, accepted_tokens: all its drafts that were verified, and all that became output, with the last update.
    kv_transfer_params: what another engine must know to go on with the request, with the last update.
    """

    id: str
    tokens: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    mistake: bool = False
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs] | None = None
    cached: int = 0
    scheduled: float = 0.0
    pooled: bytes = b""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None


class CacheEntry(msgspec.Struct, frozen=True):
    """One block or snapshot of an exported prefix.

    group: cache group of the block, -1 for a snapshot of recurrent states.
    digest: of all that it depends on (`graphllm.engine.cache.digests`).
    data: as the executor gave it.
    """

    group: int
    digest: bytes
    data: bytes


class CoreInfo(msgspec.Struct, frozen=True):
    """What the front must know of a core to check requests.

    max_model_len: tokens of prompt and output together.
    capacity: tokens of the longest sequence that the cache holds.
    task: "generate", or "pool" for a model that gives vectors.
    vector_size: numbers of a vector.
    vectors: what has a vector, a "sequence" or each "token".
    adapted: layers that adapters may change; empty without tables of adapters.
    max_lora_rank: the rank that the tables hold.
    """

    max_model_len: int
    vocab: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    capacity: int
    max_logprobs: int
    max_logit_bias: int
    device: str
    task: str = "generate"
    vector_size: int = 0
    vectors: str = "sequence"
    adapted: list[AdaptedLinear] = []
    max_lora_rank: int = 0


class Distribution(msgspec.Struct):
    """A histogram.

    bounds: upper bounds, increasing.
    counts[i]: values above bounds[i - 1] and up to bounds[i]; the last count has no upper bound.
    total: sum of the values.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    @classmethod
    def over(cls, bounds: tuple[float, ...]) -> Distribution:
        """No values yet."""
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value that came ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[float, int]]:
        """Every bound, the last one infinite, and how many values are up to it."""
        return list(zip((*self.bounds, math.inf), itertools.accumulate(self.counts), strict=True))

    def __add__(self, other: Distribution) -> Distribution:
        """Both together; they have the same bounds."""
        counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        return Distribution(self.bounds, counts, self.total + other.total)


def _step_seconds() -> Distribution:
    return Distribution.over(STEP_SECONDS)


def _step_tokens() -> Distribution:
    return Distribution.over(STEP_TOKENS)


class BucketStats(msgspec.Struct):
    """Finished steps of one bucket of the artifact.

    seconds: of each step. Where steps overlap, a step begins at the end of the step before, so the total is the time in
    which any step ran.
    tokens: computed tokens.
    padding: tokens computed for nothing.
    """

    seconds: Distribution = msgspec.field(default_factory=_step_seconds)
    tokens: int = 0
    padding: int = 0


class TierStats(msgspec.Struct):
    """A tier of the cache below the device; counters only grow.

    total_bytes, used_bytes: of copies.
    hit_tokens: that came from there instead of being computed.
    stored_bytes, copied_bytes: that went there, and that came from there.
    damaged_files: that were no good, and were deleted.
    dropped_files: that found no room to be written.
    failed_files: that the operating system has refused to read or write.
    """

    total_bytes: int = 0
    used_bytes: int = 0
    hit_tokens: int = 0
    stored_bytes: int = 0
    copied_bytes: int = 0
    damaged_files: int = 0
    dropped_files: int = 0
    failed_files: int = 0


class CoreStats(msgspec.Struct):
    """Gauges and counters of a core; counters only grow.

    started: `time.monotonic` of the core's beginning; it distinguishes a core from its successor.
    steps: launched steps.
    kv_usage: share of the blocks that running requests hold.
    free_blocks: blocks nobody holds (cached ones included).
    prefix_queries, prefix_hits: prompt tokens looked up and found in the prefix cache.
    prefix_hits_without_state: tokens with blocks that were found there, but no recurrent state after them.
    prompt_tokens: tokens of computed prompts.
    cached_tokens: how many of the prompt tokens came from the cache.
    step_tokens: tokens of each finished step.
    buckets: by the name of the bucket.
    expert_tokens: by layer and expert; empty where they are not counted.
    expert_moves: copies of experts that were moved between ranks.
    expert_balancedness: by layer, the recent mean of the ranks' tokens over the most.
    drafts, draft_tokens: see `Acceptance`.
    accepted_tokens: see `Acceptance`, by the draft's place.
    max_adapters: adapters that have tables at a time.
    adapters_running, adapters_waiting: adapters of requests with and without a slot, by name.
    token_vector_bytes: bytes of kept vectors.
    token_vector_hits: prompts that had their vectors from there.
    paused: requests are held back, see `graphllm.engine.parts.sleep`.
    sleep_level: of a core that has given memory back; 0 otherwise.
    tiers: of the cache, by name.
    kv_event_batches: batches of events of the cache.
    kv_event_batches_dropped: how many of them found no room in the publisher's queue.
    kv_events: where a core publishes them, as `KVEventsConfig` has it; empty where it does not, and of several cores.
    """

    started: float = 0.0
    steps: int = 0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    free_blocks: int = 0
    total_blocks: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_hits_without_state: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    finished: dict[str, int] = {}
    step_tokens: Distribution = msgspec.field(default_factory=_step_tokens)
    buckets: dict[str, BucketStats] = {}
    expert_tokens: list[list[int]] = []
    expert_moves: int = 0
    expert_balancedness: dict[int, float] = {}
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: list[int] = []
    max_adapters: int = 0
    adapters_running: list[str] = []
    adapters_waiting: list[str] = []
    token_vector_bytes: int = 0
    token_vector_hits: int = 0
    paused: bool = False
    sleep_level: int = 0
    tiers: dict[str, TierStats] = {}
    kv_event_batches: int = 0
    kv_event_batches_dropped: int = 0
    kv_events: dict[str, Any] = {}

    # vLLM's names, which loggers written for it read.
    num_running_reqs = property(lambda self: self.running)
    num_waiting_reqs = property(lambda self: self.waiting)
    kv_cache_usage = property(lambda self: self.kv_usage)


class Core(Protocol):
    """What a driver needs of an engine core; `graphllm.engine.core.EngineCore` is the real one."""

    @property
    def info(self) -> CoreInfo: ...
    @property
    def unfinished(self) -> int: ...
    @property
    def kernels_done(self) -> int: ...
    def add(self, request: EngineRequest) -> None: ...
    def abort(self, ids: Iterable[str]) -> None: ...
    def step(self) -> list[EngineCoreOutput]: ...
    def stats(self) -> CoreStats: ...
    def reset_prefix_cache(self) -> bool: ...
    def collective_rpc(self, call: Call, timeout: float | None = None) -> list[Any]: ...
    def warm_up(self) -> bool:
        """Prepare something that no request has needed yet, in some tens of milliseconds, while there is no request to
        run; returns whether there is more."""

    def check_health(self) -> None:
        """Raise when the process that runs its steps is gone; call it when there is no step to run."""

    @property
    def wakeup_fd(self) -> int | None:
        """A file descriptor that can be read when there is something to do without a request, if there ever is."""

    def hear(self) -> None:
        """Read what there is to do; it counts as ``unfinished`` from then on."""

    def close(self) -> None: ...
