"""The table of the server's metric families: what each means, where its values come from, and vLLM's name for it, under
which dashboards and autoscalers made for vLLM look for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.metrics.expert_load import imbalance
from graphllm.engine.requests.outputs import RequestMetrics
from graphllm.engine.requests.request import STEP_SECONDS, CoreStats, Distribution

Labels = tuple[str, ...]
Value = float | Distribution
Series = Mapping[Labels, Value]

_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 1.5, 2.5, 5, 7.5, 10, 15, 25,
    50, 100, 250, 500, 1000,
)  # fmt: skip
_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
_COUNT = (1, 2, 5, 10, 20)
_REASONS: tuple[Labels, ...] = (("stop",), ("length",), ("repetition",), ("abort",), ("error",))
_PLAIN: tuple[Labels, ...] = ((),)


class Finished(NamedTuple):
    """A request that ran to its end.

    prompt, cached: tokens, all and from the prefix cache.
    generated: tokens of each completion.
    """

    times: RequestMetrics
    params: SamplingParams
    prompt: int
    cached: int
    generated: list[int]


class Family(NamedTuple):
    """A family of series.

    name: what follows "graphllm_".
    alias: what follows "vllm:", "" where vLLM has none.
    start: label values that are shown before anything was counted.
    bounds: of a histogram.

    core: reads the values from a core's figures.
    request: what a finished request adds to a histogram, None for nothing.

    Families with neither are counted as they come, by `graphllm.server.supervision.metrics.Metrics`.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    alias: str = ""
    labels: Labels = ()
    start: tuple[Labels, ...] = _PLAIN
    bounds: tuple[float, ...] = ()
    core: Callable[[CoreStats], Series] | None = None
    request: Callable[[Finished], float | None] | None = None


def _span(start: float, end: float) -> float | None:
    return end - start if start and end else None


def _pace(done: Finished) -> float | None:
    """Seconds for each token after the first, of the longest completion."""
    tokens = max(done.generated) - 1
    return (done.times.last_token_time - done.times.first_token_time) / tokens if tokens > 0 else None


def _adapters(stats: CoreStats) -> Series:
    if not stats.max_adapters:
        return {}
    running, waiting = stats.adapters_running, stats.adapters_waiting
    return {(str(stats.max_adapters), ",".join(running), ",".join(waiting)): float(bool(running or waiting))}


def _sleep(stats: CoreStats) -> Series:
    """1 for the state of a core, 0 for the others."""
    awake, level = not stats.paused, stats.sleep_level
    return {("awake",): awake, ("weights_offloaded",): level == 1, ("discard_all",): level == 2}


OF_CORE = (
    Family(
        "requests_running", "gauge", "Sequences in the running batch.", "num_requests_running",
        core=lambda s: {(): s.running},
    ),
    Family(
        "requests_waiting", "gauge", "Sequences in the queue.", "num_requests_waiting", core=lambda s: {(): s.waiting}
    ),
    Family(
        "lora_requests_info", "gauge", "Adapters of the running and the waiting sequences, 1 where there are any.",
        "lora_requests_info", labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"), start=(),
        core=_adapters,
    ),
    Family(
        "requests_waiting_by_reason", "gauge", "Sequences in the queue, by what they wait for.",
        "num_requests_waiting_by_reason", labels=("reason",), core=lambda s: {("capacity",): s.waiting},
    ),
    Family(
        "kv_cache_usage_ratio", "gauge", "Share of the KV cache's blocks that running sequences hold, 0 to 1.",
        "kv_cache_usage_perc", core=lambda s: {(): s.kv_usage},
    ),
    Family(
        "engine_sleep_state", "gauge",
        "1 for what an engine core does: it is awake, or sleeps at level 1 (weights_offloaded) or 2 (discard_all).",
        "engine_sleep_state", labels=("sleep_state",), core=_sleep,
    ),
    Family(
        "prefix_cache_queries", "counter", "Tokens looked up in the prefix cache.", "prefix_cache_queries",
        core=lambda s: {(): s.prefix_queries},
    ),
    Family(
        "prefix_cache_hits", "counter", "Tokens found in the prefix cache.", "prefix_cache_hits",
        core=lambda s: {(): s.prefix_hits},
    ),
    Family(
        "prefix_cache_hits_without_state", "counter",
        "Tokens with blocks in the prefix cache, computed again because no recurrent state after them is kept.",
        core=lambda s: {(): s.prefix_hits_without_state},
    ),
    Family(
        "external_prefix_cache_queries", "counter", "Tokens looked up in the cache, where it has tiers.",
        "external_prefix_cache_queries", core=lambda s: {(): s.prefix_queries if s.tiers else 0},
    ),
    Family(
        "external_prefix_cache_hits", "counter", "Tokens that came from a tier instead of being computed.",
        "external_prefix_cache_hits", core=lambda s: {(): s.tiers["host"].hit_tokens if s.tiers else 0},
    ),
    Family(
        "cache_tier_hits", "counter",
        "Tokens that came from a tier instead of being computed; what comes from further away passes host, too.",
        labels=("tier",), start=(), core=lambda s: {(name,): t.hit_tokens for name, t in s.tiers.items()},
    ),
    Family(
        "cache_tier_bytes", "gauge", "Memory or files of a tier of the cache: used, and in all.",
        labels=("tier", "kind"), start=(), core=lambda s: {
            (name, kind): count
            for name, t in s.tiers.items()
            for kind, count in (("used", t.used_bytes), ("total", t.total_bytes))
        },
    ),
    Family(
        "cache_tier_copied_bytes", "counter", "Bytes copied to a tier of the cache, and from it.",
        labels=("tier", "direction"), start=(), core=lambda s: {
            (name, direction): count
            for name, t in s.tiers.items()
            for direction, count in (("to", t.stored_bytes), ("from", t.copied_bytes))
        },
    ),
    Family(
        "cache_tier_lost_files", "counter",
        "Files of a tier that hold nothing of use: damaged, dropped for want of room, or failed to be read or written.",
        labels=("tier", "kind"), start=(), core=lambda s: {
            (name, kind): count
            for name, t in s.tiers.items() if name == "disk"
            for kind, count in (
                ("damaged", t.damaged_files), ("dropped", t.dropped_files), ("failed", t.failed_files)
            )
        },
    ),
    Family(
        "token_vector_cache_bytes", "gauge", "Memory of vectors for each token that are kept for prompts to come.",
        core=lambda s: {(): s.token_vector_bytes},
    ),
    Family(
        "token_vector_cache_hits", "counter", "Prompts that found vectors of all their tokens in the cache.",
        core=lambda s: {(): s.token_vector_hits},
    ),
    Family(
        "kv_event_batches", "counter", "Batches of events of the prefix cache, dropped ones included.",
        core=lambda s: {(): s.kv_event_batches},
    ),
    Family(
        "kv_event_batches_dropped", "counter", "Batches of events that found no room in the publisher's queue.",
        core=lambda s: {(): s.kv_event_batches_dropped},
    ),
    Family(
        "preemptions", "counter", "Sequences that lost their blocks and were computed again.", "num_preemptions",
        core=lambda s: {(): s.preemptions},
    ),
    Family(
        "prompt_tokens", "counter", "Tokens of computed prompts, cached ones included.", "prompt_tokens",
        core=lambda s: {(): s.prompt_tokens},
    ),
    Family(
        "prompt_tokens_cached", "counter", "Tokens of computed prompts that the prefix cache held.",
        "prompt_tokens_cached", core=lambda s: {(): s.cached_tokens},
    ),
    Family(
        "prompt_tokens_by_source", "counter", "Tokens of prompts, computed and from the prefix cache.",
        "prompt_tokens_by_source", labels=("source",), core=lambda s: {
            ("local_compute",): s.prompt_tokens - s.cached_tokens, ("local_cache_hit",): s.cached_tokens
        },
    ),
    Family(
        "prompt_tokens_cached_by_source", "counter", "Tokens of prompts that were not computed, by where they were.",
        "prompt_tokens_cached_by_source", labels=("source",), core=lambda s: {("local_cache_hit",): s.cached_tokens},
    ),
    Family(
        "generation_tokens", "counter", "Tokens generated.", "generation_tokens",
        core=lambda s: {(): s.generated_tokens},
    ),
    Family(
        "iteration_tokens", "histogram", "Tokens computed in a step of the engine.", "iteration_tokens_total",
        core=lambda s: {(): s.step_tokens},
    ),
    Family(
        "step_seconds", "histogram", "Time of a step, by bucket of the artifact; the sum is the time the engine ran.",
        labels=("bucket",), core=lambda s: {(name,): b.seconds for name, b in s.buckets.items()},
    ),
    Family(
        "step_tokens", "counter", "Tokens computed in steps: real ones, and those that pad a step to its graph's size.",
        labels=("bucket", "kind"), core=lambda s: {
            (name, kind): count
            for name, b in s.buckets.items()
            for kind, count in (("real", b.tokens), ("padding", b.padding))
        },
    ),
    Family(
        "draft_steps", "counter", "Drafts of a sequence that a step verified.", "spec_decode_num_drafts",
        core=lambda s: {(): s.drafts},
    ),
    Family(
        "draft_tokens", "counter", "Drafted tokens that steps verified.", "spec_decode_num_draft_tokens",
        core=lambda s: {(): s.draft_tokens},
    ),
    Family(
        "accepted_tokens", "counter", "Drafted tokens that were right.", "spec_decode_num_accepted_tokens",
        core=lambda s: {(): sum(s.accepted_tokens)},
    ),
    Family(
        "accepted_tokens_per_position", "counter", "Drafted tokens that were right, by their place in the draft.",
        "spec_decode_num_accepted_tokens_per_pos", labels=("position",), start=(),
        core=lambda s: {(f"{i}",): count for i, count in enumerate(s.accepted_tokens)},
    ),
    Family(
        "acceptance_length", "gauge", "Tokens that a sequence got from a step that verified drafts, on average.",
        core=lambda s: {(): 1 + sum(s.accepted_tokens) / max(s.drafts, 1)},
    ),
    Family(
        "expert_tokens", "counter", "Tokens that chose an expert, where count_expert_tokens or enable_eplb is set.",
        labels=("layer", "expert"), start=(), core=lambda s: {
            (f"{i}", f"{n}"): count
            for i, row in enumerate(s.expert_tokens) if any(row) for n, count in enumerate(row)
        },
    ),
    Family(
        "expert_load_imbalance", "gauge", "Tokens of a layer's busiest expert over the mean of all; 1 is balanced.",
        labels=("layer",), start=(),
        core=lambda s: {(f"{i}",): ratio for i, ratio in imbalance(s.expert_tokens).items()},
    ),
    Family(
        "expert_balancedness", "gauge",
        "With enable_eplb: the mean of the ranks' tokens over the most, in the last eplb_window_size steps.",
        labels=("layer",), start=(), core=lambda s: {(f"{i}",): even for i, even in s.expert_balancedness.items()},
    ),
    Family(
        "expert_moves", "counter", "Copies of experts that enable_eplb has moved between ranks or slots.",
        core=lambda s: {(): s.expert_moves},
    ),
)  # fmt: skip

OF_REQUESTS = (
    Family(
        "e2e_request_latency_seconds", "histogram", "From a request's arrival to its end.",
        "e2e_request_latency_seconds", bounds=_SECONDS,
        request=lambda r: _span(r.times.arrival_time, r.times.finished_time),
    ),
    Family(
        "request_queue_time_seconds", "histogram", "From a request's arrival to its first step.",
        "request_queue_time_seconds", bounds=_SECONDS,
        request=lambda r: _span(r.times.arrival_time, r.times.first_scheduled_time),
    ),
    Family(
        "request_prefill_time_seconds", "histogram", "From a request's first step to its first token.",
        "request_prefill_time_seconds", bounds=_SECONDS,
        request=lambda r: _span(r.times.first_scheduled_time, r.times.first_token_time),
    ),
    Family(
        "request_decode_time_seconds", "histogram", "From a request's first token to its last.",
        "request_decode_time_seconds", bounds=_SECONDS,
        request=lambda r: _span(r.times.first_token_time, r.times.last_token_time),
    ),
    Family(
        "request_inference_time_seconds", "histogram", "From a request's first step to its last token.",
        "request_inference_time_seconds", bounds=_SECONDS,
        request=lambda r: _span(r.times.first_scheduled_time, r.times.last_token_time),
    ),
    Family(
        "request_time_per_output_token_seconds", "histogram", "A request's mean time for each token after its first.",
        "request_time_per_output_token_seconds", bounds=STEP_SECONDS, request=_pace,
    ),
    Family(
        "request_prompt_tokens", "histogram", "Tokens of a request's prompt.", "request_prompt_tokens",
        bounds=_TOKENS, request=lambda r: r.prompt,
    ),
    Family(
        "request_prefill_kv_computed_tokens", "histogram", "Prompt tokens that the prefix cache did not hold.",
        "request_prefill_kv_computed_tokens", bounds=_TOKENS, request=lambda r: r.prompt - r.cached,
    ),
    Family(
        "request_generation_tokens", "histogram", "Tokens of all of a request's completions.",
        "request_generation_tokens", bounds=_TOKENS, request=lambda r: sum(r.generated),
    ),
    Family(
        "request_max_num_generation_tokens", "histogram", "Tokens of a request's longest completion.",
        "request_max_num_generation_tokens", bounds=_TOKENS, request=lambda r: max(r.generated),
    ),
    Family(
        "request_params_n", "histogram", "Completions that a request asked for.", "request_params_n", bounds=_COUNT,
        request=lambda r: r.params.n,
    ),
    Family(
        "request_params_max_tokens", "histogram", "The limit of tokens of a request that gave one.",
        "request_params_max_tokens", bounds=_TOKENS, request=lambda r: r.params.max_tokens,
    ),
)  # fmt: skip

COUNTED = (
    Family(
        "time_to_first_token_seconds", "histogram", "From a request's arrival to its first token.",
        "time_to_first_token_seconds", bounds=_SECONDS,
    ),
    Family(
        "inter_token_latency_seconds", "histogram", "Between tokens of a completion; those that come together share.",
        "inter_token_latency_seconds", bounds=STEP_SECONDS,
    ),
    Family(
        "requests_finished", "counter", "Completions that ended, by reason.", "request_success",
        labels=("finished_reason",), start=_REASONS,
    ),
    Family(
        "admission_rejections", "counter", "Requests refused because of the load, by the limit that was reached.",
        "admission_rejections", labels=("reason",), start=(("max_num_queued_reqs",),),
    ),
    Family("http_requests", "counter", "HTTP requests answered.", labels=("route", "status"), start=()),
    Family("http_requests_in_flight", "gauge", "HTTP requests that are not answered yet."),
    Family(
        "http_request_seconds", "histogram", "From an HTTP request's head to the end of its answer.",
        labels=("route",), start=(), bounds=_SECONDS,
    ),
    Family("startup_seconds", "gauge", "Time of each phase of the engine's start.", labels=("phase",), start=()),
)  # fmt: skip
UP = Family(
    "engine_up", "gauge", "1 if the engine core answered just now; without it its gauges are left out.",
    core=lambda s: {(): 1.0},
)  # fmt: skip

FAMILIES = (*OF_CORE, *OF_REQUESTS, *COUNTED, UP)
BY_NAME = {family.name: family for family in FAMILIES}

# vLLM's names for what there is not, with why.
_NO_LIFETIMES = "blocks have no clock; see prefix_cache_hits and kv_cache_usage_perc"
NOT_MEASURED = {
    "num_requests_kv_fetch_by_stage": "a request that waits for blocks of another engine is one that waits",
    "corrupted_requests": "logits that are no numbers end a request with finished_reason error: see request_success",
    "watermark_requests": "answers carry no watermark",
    "mm_cache_queries": "models here read text only",
    "mm_cache_hits": "models here read text only",
    "request_num_preemptions": "counted for all together: see num_preemptions",
    "kv_block_lifetime_seconds": _NO_LIFETIMES,
    "kv_block_idle_before_evict_seconds": _NO_LIFETIMES,
    "kv_block_reuse_gap_seconds": _NO_LIFETIMES,
}
