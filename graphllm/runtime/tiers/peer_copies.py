"""PeerCopies: the ranks' side of a connector between engines, which copies entries from the memory of another engine's
rank into this one's."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from graphllm.runtime.tiers.connector_worker import Entry, Finished, KVConnectorWorker
from graphllm.runtime.tiers.host_memory import HostMemory

_log = logging.getLogger(__name__)
Pairs = Sequence[tuple[int, int]]  # an entry of this rank's memory, and one of the peer's


class PeerCopies(KVConnectorWorker):
    """One thread that copies, load by load.

    The metadata of a load has what the other engine's ranks say of themselves ("ranks"), and the peer's number of each
    entry ("entries").
    """

    def __init__(self, memory: HostMemory, rank: int, num_ranks: int, config: Mapping[str, Any]) -> None:
        super().__init__(memory, rank, num_ranks, config)
        self._work: queue.SimpleQueue[tuple[int, Sequence[Entry], Any] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="peer-copies", daemon=True)
        self._thread.start()

    # What a way to copy has to say

    def get_handshake_metadata(self) -> dict[str, Any]:
        """shapes: of the memory of each kind, [entries, pieces, bytes]. Ways to copy add what they need."""
        return {"shapes": {kind: list(self.memory.pieces(kind).shape) for kind in self.memory.kinds}}

    def read(self, peer: Mapping[str, Any], pairs: Mapping[str, Pairs]) -> None:
        """Copy entries of each kind. When this returns or raises, nothing is written into them any more.

        peer: the metadata of the same rank of the other engine.

        Raises OSError, ValueError or LookupError.
        """
        raise NotImplementedError

    # The thread

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
        peer, pairs = metadata["ranks"][self.rank], dict[str, list[tuple[int, int]]]()
        for entry, number in zip(entries, metadata["entries"], strict=True):
            pairs.setdefault(entry.kind, []).append((entry.number, number))
        for kind, of in pairs.items():
            (count, *there), (_, *here) = peer["shapes"][kind], self.memory.pieces(kind).shape
            if there != here:
                raise ValueError(f"entries there are of {there} bytes, here of {here}")
            if not all(0 <= number < count for _, number in of):
                raise ValueError(f"there are {count} entries, others were named")
        self.read(peer, pairs)
