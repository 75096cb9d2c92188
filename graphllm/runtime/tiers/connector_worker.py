"""KVConnectorWorker: the side of a connector that is on a rank; the core's side is
`graphllm.engine.transfer.kv_connector.KVConnector`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from graphllm.runtime.tiers.host_memory import HostMemory


class Entry(NamedTuple):
    """An entry of host memory, and what it holds, or is to hold.

    kind: "blocks" or "snapshots".
    group: of the cache, -1 for snapshots.
    digest: of the contents and all before them; with the group it is the same in all engines that share a secret.
    number: in host memory; `HostMemory.entry` gives the bytes.
    """

    kind: str
    group: int
    digest: bytes
    number: int


class Finished(NamedTuple):
    """The end of a load or a save.

    ticket: that it was begun with.
    done: of each entry, whether it was.
    seconds: that it took.
    """

    ticket: int
    done: list[bool]
    seconds: float


class KVConnectorWorker:
    """Every method runs in the thread that the rank's commands run in, and returns at once: what takes time belongs
    into threads of the worker's own.

    memory: the rank's host memory. Entries of a load or a save are nobody else's until it has finished.
    rank, num_ranks: all ranks of an engine load and save the same entries, each its own part.
    config: what the core's side says in `worker_config`, by default kv_connector_extra_config.
    """

    def __init__(self, memory: HostMemory, rank: int, num_ranks: int, config: Mapping[str, Any]) -> None:
        self.memory, self.rank, self.num_ranks, self.config = memory, rank, num_ranks, config

    def start_load_kv(self, ticket: int, entries: Sequence[Entry], metadata: Any) -> None:
        """Begin to fill entries. metadata: what the core's side has made for this load."""
        raise NotImplementedError(f"{type(self).__name__} loads nothing")

    def start_save_kv(self, ticket: int, entries: Sequence[Entry], metadata: Any) -> None:
        """Begin to save entries."""
        raise NotImplementedError(f"{type(self).__name__} saves nothing")

    def get_finished(self) -> Sequence[Finished]:
        """The loads and saves that have ended since this was last asked."""
        return ()

    def get_handshake_metadata(self) -> Any:
        """What the same rank of another engine must know to reach this one, as plain data."""
        return None

    def shutdown(self) -> None:
        """Stop threads; nothing follows."""
