"""Prefixes of the cache that go to other engine cores, and come from them, between two steps."""

from __future__ import annotations

from collections.abc import Sequence

from graphllm.engine.parts.part import Part
from graphllm.engine.requests.request import CacheEntry, EngineRequest
from graphllm.engine.step.device_states import export_prefix, import_prefix


class Exchange(Part):
    """Both cores have the same artifact and ``cache_secret``."""

    name = "exchange"

    def export_cache(self, request: EngineRequest) -> list[CacheEntry]:
        """What the cache has of a request's prompt: blocks up to its last block boundary, and the snapshot there."""
        return export_prefix(self.context.executor, self.context.scheduler.cache, request)

    def import_cache(self, entries: Sequence[CacheEntry]) -> int:
        """Have requests find what another core exported; how many of the entries were new. Raises ConfigError."""
        return import_prefix(self.context.executor, self.context.scheduler.cache, entries)
