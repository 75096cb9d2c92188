"""What fronts ask their controller for: all that their requests share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from graphllm.server.process.fronts.front_process import FrontProcess
from graphllm.server.process.fronts.messages import (
    AbortRequests,
    CountInFlight,
    EndResponse,
    FindAdapter,
    GetResponse,
    ListAdapters,
    OfFront,
    PutAdapter,
    PutResponse,
    ReadMetrics,
    RemoveAdapter,
    RemoveResponse,
    TakeRoom,
    TakeTurn,
)
from graphllm.server.process.fronts.questions import EndedError, answer
from graphllm.server.service.shared_state import Shared
from graphllm.server.service.stored_responses import ResponseStore


class Answers:
    """Answers the questions of fronts, each in a task.

    shared: rooms, rates, adapters and figures of the whole server.
    store: responses that are kept.
    fronts: by name.
    send: sends a front a message.
    """

    def __init__(
        self,
        shared: Shared,
        store: ResponseStore,
        fronts: Mapping[bytes, FrontProcess],
        send: Callable[[FrontProcess, msgspec.Struct], None],
    ) -> None:
        self._shared, self._store, self._fronts, self._send = shared, store, fronts, send
        self._tasks: set[asyncio.Task[Any]] = set()

    def cancel(self) -> None:
        """End all that is not answered."""
        for task in list(self._tasks):
            task.cancel()

    def asked(self, front: FrontProcess, number: int, question: OfFront) -> None:
        """A front asks something. number: of its question, for the answer."""
        held = contextlib.ExitStack()
        work = self._answer(front, question, held)
        task = asyncio.create_task(answer(number, work, lambda found: self._send(front, found)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if isinstance(question, TakeRoom):  # from now on it can be given back
            front.rooms[question.ticket] = held, task

    async def _answer(self, front: FrontProcess, question: OfFront, held: contextlib.ExitStack) -> Any:
        shared, store = self._shared, self._store
        match question:
            case TakeRoom(room, _, size):
                await (shared.bodies if room == "bodies" else shared.values).take(size, held)
            case TakeTurn(caller):
                assert shared.rate is not None
                return await shared.rate.take(caller)
            case PutResponse(id, record):
                store.put(id, record)
                (front.writing.add if record.running else front.writing.discard)(id)
            case GetResponse(id):
                return store.get(id)
            case RemoveResponse(id):
                store.remove(id)
            case EndResponse(id):
                writers = [other for other in self._fronts.values() if id in other.writing]
                for writer in writers:
                    with contextlib.suppress(EndedError):
                        await writer.questions.ask(question)
            case ListAdapters():
                return await shared.adapters.all()
            case FindAdapter(name):
                return await shared.adapters.find(name)
            case PutAdapter(adapter):
                await shared.adapters.put(adapter)
            case RemoveAdapter(name):
                return await shared.adapters.remove(name)
            case ReadMetrics(openmetrics):
                text, kind = await shared.overview.metrics(openmetrics)
                return text.decode(), kind
            case CountInFlight():
                return await shared.overview.in_flight()
            case AbortRequests(names):
                return await shared.overview.abort(names)
        return None
