"""Responses that are kept: to be asked for again, gone on from, and cancelled while they run in the background."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec


@dataclass(frozen=True)
class StoredResponse:
    """body: the response. conversation: the chat up to its end, without instructions. input: its items. running: it is
    written in the background, by the process that has put it here."""

    body: dict[str, Any]
    conversation: list[dict[str, Any]]
    input: list[dict[str, Any]] = field(default_factory=list)
    running: bool = False

    def abandoned(self) -> StoredResponse:
        """What becomes of it when the process that wrote it is gone."""
        error = {"code": "server_error", "message": "the process that wrote it has ended; send the request again"}
        return replace(self, body={**self.body, "status": "failed", "error": error}, running=False)


class Responses(Protocol):
    """The responses that all of a server's requests see."""

    async def put(self, id: str, record: StoredResponse, task: asyncio.Task[Any] | None = None) -> None:
        """Keep a record in the place of one with the same id. task: what writes the rest of it, if it runs."""
        ...

    async def get(self, id: str) -> StoredResponse | None:
        """None for one that is not kept."""
        ...

    async def end(self, id: str) -> None:
        """Cancel what writes a response, and wait until it has put what there is."""
        ...

    async def remove(self, id: str) -> None:
        """Forget a response; it is not running."""
        ...


class Writers:
    """The tasks of this process that write responses."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    def add(self, id: str, task: asyncio.Task[Any]) -> None:
        self._tasks[id] = task
        task.add_done_callback(lambda _: self._tasks.pop(id, None))

    async def end(self, id: str) -> None:
        """Cancel one, and wait for its end."""
        if (task := self._tasks.get(id)) is not None:
            task.cancel()
            await asyncio.wait({task})


class OwnResponses:
    """In a store of this process's own."""

    def __init__(self, store: ResponseStore) -> None:
        self._store, self._writers = store, Writers()

    async def put(self, id: str, record: StoredResponse, task: asyncio.Task[Any] | None = None) -> None:
        if task is not None:
            self._writers.add(id, task)
        self._store.put(id, record)

    async def get(self, id: str) -> StoredResponse | None:
        return self._store.get(id)

    async def end(self, id: str) -> None:
        await self._writers.end(id)

    async def remove(self, id: str) -> None:
        self._store.remove(id)


class ResponseStore:
    """Responses by id, up to a number and to bytes of JSON; the oldest leave first.

    Responses that run stay, so that they can be cancelled: what limits the server's requests limits them.
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
        """Forgets a record."""
        record, size = self._records.pop(id, (None, 0))
        self.bytes -= size
        return record
