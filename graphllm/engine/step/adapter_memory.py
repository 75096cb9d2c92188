"""AdapterMemory: tables of adapters in the host's memory, read by a thread while steps run; the least recently used
are dropped."""

from __future__ import annotations

import concurrent.futures
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from graphllm.config import ConfigError
from graphllm.engine.requests.request import Adapter

if TYPE_CHECKING:
    import torch

Tables = Mapping[str, "torch.Tensor"]
Read = Callable[[Adapter], Tables]
"""Reads an adapter's tables by the names of their states. Raises ConfigError for files that are gone or changed."""


class AdapterMemory:
    """count: adapters that are kept, at least as many as the device has entries. read: runs in a thread."""

    def __init__(self, count: int, read: Read) -> None:
        self._count, self._read = count, read
        self._tables: OrderedDict[str, Tables] = OrderedDict()
        self._given: dict[str, Tables] = {}
        self._loading: dict[str, concurrent.futures.Future[Tables]] = {}
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "graphllm-adapters")

    @property
    def digests(self) -> set[str]:
        """Of those that are there."""
        return {*self._tables, *self._given}

    def __getitem__(self, digest: str) -> Tables:
        """Tables that are there."""
        if digest in self._given:
            return self._given[digest]
        self._tables.move_to_end(digest)
        return self._tables[digest]

    def put(self, digest: str, tables: Tables) -> None:
        """Keep tables that no file has, for good."""
        self._given[digest] = tables

    def request(self, wanted: Iterable[Adapter]) -> None:
        """Begin to read those that are neither there nor being read."""
        for adapter in wanted:
            if adapter.digest not in self._loading and adapter.digest not in self.digests:
                self._loading[adapter.digest] = self._thread.submit(self._read, adapter)

    def take(self, needed: Iterable[str]) -> dict[str, str]:
        """Take in what has been read; by digest, what was wrong with the others. Adapters that are needed stay."""
        failed: dict[str, str] = {}
        for digest in [d for d, reading in self._loading.items() if reading.done()]:
            try:
                self._tables[digest] = self._loading.pop(digest).result()
            except (ConfigError, OSError, MemoryError) as problem:
                failed[digest] = str(problem) or type(problem).__name__
        keep = set(needed)
        for digest in [d for d in self._tables if d not in keep][: max(0, len(self._tables) - self._count)]:
            del self._tables[digest]
        return failed

    def wait(self, seconds: float) -> None:
        """Wait for one that is being read, for so long at most."""
        if self._loading:
            futures = self._loading.values()
            concurrent.futures.wait(futures, timeout=seconds, return_when=concurrent.futures.FIRST_COMPLETED)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(cancel_futures=True)
