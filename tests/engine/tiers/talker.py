"""A process with an engine core whose cache has all tiers: it reads requests, and writes what each got, line by line.
It may be killed at any time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from graphllm.config import (
    CacheConfig,
    CoreConfig,
    LoadConfig,
    ModelConfig,
    SchedulerConfig,
    TierConfig,
)
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.core import EngineCore
from graphllm.loading.core.load import load_core
from tests.engine.harness import Result, request


def open_small(model: str, place: str, pages: int, disk: str | None, host: int) -> EngineCore:
    """With so few pages that blocks travel. host: bytes, 0 for no tier."""
    from graphllm.program.artifact import Artifact

    memory = Artifact.open(Path(place)).memory
    snapshots = 6 * memory.snapshot if memory.snapshot else None
    cache = CacheConfig(kv_cache_memory_bytes=pages * memory.block, snapshot_memory_bytes=snapshots)
    tiers = TierConfig(host, "lru", disk)
    return load_core(CoreConfig(ModelConfig(model), LoadConfig(place), cache, SchedulerConfig(), (), tiers=tiers))


def serve(core: EngineCore, asked: list[dict[str, Any]], at_once: int = 6) -> Any:
    """(id, tokens, cached) of each request as it ends. Those that say so are aborted after some steps."""
    waiting, found, aborts = list(reversed(asked)), dict[str, Result](), dict[str, int]()
    while waiting or core.unfinished:
        while waiting and len(found) < at_once:
            one = waiting.pop()
            core.add(request(one["id"], one["prompt"], SamplingParams(**one["params"])))
            found[one["id"]] = Result()
            if one.get("abort"):
                aborts[one["id"]] = one["abort"]
        for update in core.step():
            found[update.id].take(update)
            if update.finish_reason:
                done = found.pop(update.id)
                aborts.pop(update.id, None)
                yield update.id, done.tokens, done.cached
        for id in list(aborts):
            aborts[id] -= 1
            if not aborts[id]:
                core.abort([id])


if __name__ == "__main__":
    settings = json.loads(sys.stdin.readline())
    opened = open_small(**settings)
    print("ready", flush=True)
    for answer in serve(opened, json.loads(sys.stdin.readline())):
        print(json.dumps(answer), flush=True)
    print(json.dumps({name: tier.hit_tokens for name, tier in opened.stats().tiers.items()}), flush=True)
    opened.close()
