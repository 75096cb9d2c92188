"""Responses that are kept: to be asked for again, gone on from, and cancelled while they run in the background."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec

from graphllm.server.responses.requests import Chat


@dataclass(frozen=True)
class StoredResponse:
    """body: the response. conversation: the chat up to its end, without instructions. input: its items. task: what
    writes the response, while it runs in the background."""

    body: dict[str, Any]
    conversation: Chat
    task: asyncio.Task[Any] | None = None
    input: list[dict[str, Any]] = field(default_factory=list)

    @property
    def running(self) -> bool:
        return self.task is not None and not self.task.done()


class ResponseStore:
    """Responses by id, up to so many and so many bytes of JSON; the oldest leave first.

    Those that run stay, so that they can be cancelled: what limits the server's requests limits them.
    """

    def __init__(self, count: int = 1000, bytes: int = 256 << 20) -> None:
        self._limits = count, bytes
        self._records: dict[str, tuple[StoredResponse, int]] = {}  # with its bytes, oldest first
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def put(self, id: str, record: StoredResponse) -> None:
        """Keeps a record, as the newest, in the place of one with the same id."""
        self.remove(id)
        size = len(msgspec.json.encode([record.body, record.conversation, *record.input]))
        self._records[id] = record, size
        self.bytes += size
        count, bytes = self._limits
        for oldest in [id for id, (kept, _) in self._records.items() if not kept.running]:
            if len(self._records) <= count and self.bytes <= bytes:
                break
            self.remove(oldest)

    def get(self, id: str) -> StoredResponse | None:
        kept = self._records.get(id)
        return kept[0] if kept else None

    def remove(self, id: str) -> StoredResponse | None:
        """Forgets a record. It is the caller's to cancel its task."""
        record, size = self._records.pop(id, (None, 0))
        self.bytes -= size
        return record
