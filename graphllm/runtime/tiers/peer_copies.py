"""PeerCopies: copies from the host memory of another engine's rank, which is mapped for as long as a copy takes."""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from graphllm.host.shared_memory import mapped, opened
from graphllm.runtime.tiers.connector_worker import Entry, Finished, KVConnectorWorker
from graphllm.runtime.tiers.host_memory import HostMemory

_log = logging.getLogger(__name__)


class PeerCopies(KVConnectorWorker):
    """The ranks' side of `HostConnector`: one thread that copies, load by load.

    The metadata of a load has the process that has the descriptors of the peer's memory ("pid"), for each rank and kind
    the descriptor and the shape [entries, pieces, bytes] ("places"), and the peer's number of each entry ("entries").
    """

    def __init__(self, memory: HostMemory, rank: int, num_ranks: int, config: Mapping[str, Any]) -> None:
        super().__init__(memory, rank, num_ranks, config)
        self._work: queue.SimpleQueue[tuple[int, Sequence[Entry], Any] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="peer-copies", daemon=True)
        self._thread.start()

    def start_load_kv(self, ticket: int, entries: Sequence[Entry], metadata: Any) -> None:
        self._work.put((ticket, entries, metadata))

    def get_finished(self) -> Sequence[Finished]:
        return [self._ended.get() for _ in range(self._ended.qsize())]

    def shutdown(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            ticket, entries, metadata = work
            begun, done = time.perf_counter(), True
            try:
                self._copy(entries, metadata)
            except (OSError, ValueError, LookupError) as failure:
                _log.warning("blocks of another engine could not be copied: %s", failure)
                done = False
            self._ended.put(Finished(ticket, [done] * len(entries), time.perf_counter() - begun))

    def _copy(self, entries: Sequence[Entry], metadata: Any) -> None:
        numbers = metadata["entries"]
        for kind, (fd, shape) in metadata["places"][self.rank].items():
            pairs = [
                (entry.number, number) for entry, number in zip(entries, numbers, strict=True) if entry.kind == kind
            ]
            if not pairs:
                continue
            mine = self.memory.pieces(kind)
            if tuple(shape[1:]) != mine.shape[1:]:
                raise ValueError(f"entries there are of {shape[1:]} bytes, here of {list(mine.shape[1:])}")
            own = opened(metadata["pid"], fd)
            try:
                theirs = mapped(own, math.prod(shape)).reshape(shape)
            finally:
                os.close(own)
            for to, at in pairs:
                mine[to] = theirs[at]
