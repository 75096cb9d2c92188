"""A connector from outside, with files of a folder as its other end; see docs/disaggregated-prefill.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphllm.engine.transfer.kv_connector import ConnectorRequest, KVConnector
from graphllm.runtime.tiers.connector_worker import Entry, Finished, KVConnectorWorker


def _file(place: str, group: int, digest: bytes, rank: int) -> Path:
    return Path(place) / f"{group}-{digest.hex()}-{rank}"


class FolderWorker(KVConnectorWorker):
    """The ranks' side. A slow folder would need a thread."""

    _finished: Sequence[Finished] = ()

    def start_load_kv(self, ticket: int, entries: Sequence[Entry], metadata: Any) -> None:
        done = []
        for kind, group, digest, number in entries:
            data = _file(metadata, group, digest, self.rank).read_bytes()
            self.memory.entry(kind, number)[:] = memoryview(data)
            done.append(True)
        self._finished = [*self._finished, Finished(ticket, done, 1e-3)]

    def start_save_kv(self, ticket: int, entries: Sequence[Entry], metadata: Any) -> None:
        for kind, group, digest, number in entries:
            _file(metadata, group, digest, self.rank).write_bytes(self.memory.entry(kind, number).tobytes())
        self._finished = [*self._finished, Finished(ticket, [True] * len(entries), 1e-3)]

    def get_finished(self) -> Sequence[Finished]:
        found, self._finished = self._finished, ()
        return found


class FolderConnector(KVConnector):
    """The core's side."""

    worker = f"{__name__}:FolderWorker"

    @property
    def place(self) -> str:
        """The folder."""
        return str(self.config.kv_connector_extra_config["place"])

    def has(self, key: tuple[int, bytes]) -> bool:
        return _file(self.place, *key, 0).exists()

    def build_connector_meta(self, entries: object) -> str:
        return self.place

    def request_finished(self, request: ConnectorRequest) -> dict[str, Any] | None:
        return {"blocks": len(request.keys), **request.kv_transfer_params}


class PatientConnector(FolderConnector):
    """It knows what it has when it was asked four times."""

    asked = 0

    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self.asked += 1
        return (None, True) if self.asked < 4 else (len(request.keys), True)
