"""Commands over a rank's side of a connector, see `graphllm.runtime.tiers.connector_worker`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graphllm.host.importing import imported
from graphllm.runtime.commands.command import Answered, Command, Device, Query
from graphllm.runtime.commands.tiers import tiers_of
from graphllm.runtime.tiers.connector_worker import Entry, KVConnectorWorker

_KEPT = "connector"  # in `Worker.kept`
Entries = list[tuple[str, int, bytes, int]]  # the fields of `Entry`


def _worker(device: Device) -> KVConnectorWorker:
    found: KVConnectorWorker = device.worker.kept[_KEPT]
    return found


class OpenConnector(Command):
    """Make the rank's side, once there is host memory. worker: its class, as module:class. config: its settings."""

    worker: str
    config: dict[str, Any]

    def run(self, device: Device) -> None:
        rank = device.worker
        kind: Any = imported("kv_connector", self.worker)
        rank.kept[_KEPT] = kind(tiers_of(device).memory, rank.rank, rank.world_size, self.config)


class CloseConnector(Command):
    """Stop its threads."""

    def run(self, device: Device) -> None:
        found: KVConnectorWorker | None = device.worker.kept.pop(_KEPT, None)
        if found is not None:
            found.shutdown()


class StartLoads(Command):
    """Begin to fill entries of host memory; see `KVConnectorWorker.start_load_kv`."""

    ticket: int
    entries: Entries
    metadata: Any

    def run(self, device: Device) -> None:
        _worker(device).start_load_kv(self.ticket, [Entry(*entry) for entry in self.entries], self.metadata)


class StartSaves(Command):
    """Begin to save entries of host memory; see `KVConnectorWorker.start_save_kv`."""

    ticket: int
    entries: Entries
    metadata: Any

    def run(self, device: Device) -> None:
        _worker(device).start_save_kv(self.ticket, [Entry(*entry) for entry in self.entries], self.metadata)


class FinishedTransfers(Query):
    """The loads and saves that have ended since this was last asked: ticket, what was done of each entry, seconds."""

    def run(self, device: Device) -> Answered:
        return Answered([list(found) for found in _worker(device).get_finished()])


class HandshakeMetadata(Query):
    """The host of this rank, and what `KVConnectorWorker.get_handshake_metadata` says."""

    def run(self, device: Device) -> Answered:
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return Answered([host, _worker(device).get_handshake_metadata()])
