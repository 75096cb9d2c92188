"""The figures of several engine cores together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

from msgspec.structs import astuple

from graphllm.engine.requests.request import BucketStats, CoreStats, TierStats

_SUMS = (
    "started", "steps", "running", "waiting", "free_blocks", "total_blocks", "prefix_queries", "prefix_hits",
    "prefix_hits_without_state", "preemptions", "prompt_tokens", "cached_tokens", "generated_tokens", "drafts",
    "draft_tokens", "max_adapters", "token_vector_bytes", "token_vector_hits", "expert_moves",
    "kv_event_batches", "kv_event_batches_dropped",
)  # fmt: skip


def total(cores: Sequence[CoreStats]) -> CoreStats:
    """Of at least one core. started is a sum, too: it changes when any of them is replaced."""
    sums = {name: sum(getattr(core, name) for core in cores) for name in _SUMS}
    held = sum(core.kv_usage * core.total_blocks for core in cores)
    found = CoreStats(**sums, kv_usage=held / max(1, sums["total_blocks"]))
    for core in cores:
        found.step_tokens = found.step_tokens + core.step_tokens
    found.finished = _added(core.finished for core in cores)
    for name in dict.fromkeys(name for core in cores for name in core.buckets):
        every = [core.buckets[name] for core in cores if name in core.buckets]
        bucket = BucketStats(tokens=sum(b.tokens for b in every), padding=sum(b.padding for b in every))
        for b in every:
            bucket.seconds = bucket.seconds + b.seconds
        found.buckets[name] = bucket
    layers = zip_longest(*(core.expert_tokens for core in cores), fillvalue=[])
    found.expert_tokens = [_columns(rows) for rows in layers]
    for core in cores:
        for layer, even in core.expert_balancedness.items():
            found.expert_balancedness[layer] = min(even, found.expert_balancedness.get(layer, 1.0))
    for name in dict.fromkeys(name for core in cores for name in core.tiers):
        tiers = [core.tiers[name] for core in cores if name in core.tiers]
        found.tiers[name] = TierStats(*(sum(of) for of in zip(*map(astuple, tiers), strict=True)))
    found.accepted_tokens = _columns([core.accepted_tokens for core in cores])
    found.adapters_running = sorted({name for core in cores for name in core.adapters_running})
    found.paused, found.sleep_level = any(c.paused for c in cores), max(c.sleep_level for c in cores)
    found.adapters_waiting = sorted({name for core in cores for name in core.adapters_waiting})
    return found


def _columns(rows: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in counts:
        for name, count in one.items():
            found[name] = found.get(name, 0) + count
    return found
