"""What requests share (`graphllm.server.service.shared_state`), as a front has it: the controller keeps it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from graphllm.server.process.fronts import messages
from graphllm.server.process.fronts.link import ControlLink
from graphllm.server.service.adapters import ServedAdapter
from graphllm.server.service.shared_state import Shared
from graphllm.server.service.stored_responses import StoredResponse, Writers
from graphllm.server.supervision.engine_view import EngineView


def remote(link: ControlLink, view: EngineView, writers: Writers, rated: bool) -> Shared:
    """rated: there is a limit of requests."""
    tickets = itertools.count()
    return Shared(
        _Room(link, "bodies", tickets),
        _Room(link, "values", tickets),
        _Rate(link) if rated else None,
        _Responses(link, writers),
        _Overview(link, view),
        _Adapters(link),
    )


class _Room:
    def __init__(self, link: ControlLink, name: Literal["bodies", "values"], tickets: Iterator[int]) -> None:
        self._link, self._name, self._tickets = link, name, tickets

    async def take(self, size: int, held: contextlib.ExitStack) -> None:
        ticket = next(self._tickets)
        try:
            await self._link.ask(messages.TakeRoom(self._name, ticket, size))
        except BaseException:  # the controller waits for it, or has just given it
            self._link.tell(messages.GiveBack(ticket))
            raise
        held.callback(self._link.tell, messages.GiveBack(ticket))


class _Rate:
    def __init__(self, link: ControlLink) -> None:
        self._link = link

    async def take(self, caller: str) -> float:
        return await self._link.ask(messages.TakeTurn(caller), float)


class _Responses:
    def __init__(self, link: ControlLink, writers: Writers) -> None:
        self._link, self._writers = link, writers

    async def put(self, id: str, record: StoredResponse, task: asyncio.Task[Any] | None = None) -> None:
        if task is not None:
            self._writers.add(id, task)
        await self._link.ask(messages.PutResponse(id, record))

    async def get(self, id: str) -> StoredResponse | None:
        return await self._link.ask(messages.GetResponse(id), StoredResponse | None)

    async def end(self, id: str) -> None:
        await self._link.ask(messages.EndResponse(id))

    async def remove(self, id: str) -> None:
        await self._link.ask(messages.RemoveResponse(id))


class _Adapters:
    def __init__(self, link: ControlLink) -> None:
        self._link = link

    async def all(self) -> list[ServedAdapter]:
        return await self._link.ask(messages.ListAdapters(), list[ServedAdapter])

    async def find(self, name: str) -> ServedAdapter | None:
        return await self._link.ask(messages.FindAdapter(name), ServedAdapter | None)

    async def put(self, adapter: ServedAdapter) -> None:
        await self._link.ask(messages.PutAdapter(adapter))

    async def remove(self, name: str) -> bool:
        return await self._link.ask(messages.RemoveAdapter(name), bool)


class _Overview:
    def __init__(self, link: ControlLink, view: EngineView) -> None:
        self._link, self._view = link, view

    async def metrics(self, openmetrics: bool) -> tuple[bytes, str]:
        text, kind = await self._link.ask(messages.ReadMetrics(openmetrics), tuple[str, str])
        return text.encode(), kind

    async def in_flight(self) -> int:
        return await self._link.ask(messages.CountInFlight(), int)

    async def abort(self, names: Sequence[str]) -> int:
        _ = self._view.engine  # raises UnavailableError
        return await self._link.ask(messages.AbortRequests(list(names)), int)
