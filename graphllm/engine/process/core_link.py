"""CoreLink: one front's connection to an engine core, which may have several: requests, updates, questions.

Who starts the core's process and watches it is `graphllm.engine.process.core_client`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from graphllm.engine.process.messages import (
    Abort,
    Add,
    BadMessage,
    CallRanks,
    CoreLoad,
    CoreReply,
    Dead,
    DeathCause,
    EngineDeadError,
    FromCore,
    GetStats,
    Heartbeat,
    Hello,
    Ready,
    Rejected,
    ResetPrefixCache,
    Updates,
    address,
)
from graphllm.engine.process.sleep_orders import SleepOrder, SleepState
from graphllm.engine.process.sleepers import Ask, Sleepers
from graphllm.engine.requests.request import CoreStats, EngineRequest
from graphllm.runtime.commands.calls import Call, RankCallError

_log = logging.getLogger(__name__)
_RETRY_MS = 10  # between two tries to connect to a core that does not listen yet
_AGAIN = 2.0  # seconds until a core is greeted again that has not answered: the first time, then twice as long


class CoreLink(Sleepers):
    """One front of one engine core, in the event loop that calls `connect`.

    name: no other front of the core has it.
    loads: get the core's load from all fronts.
    """

    def __init__(self, name: str, loads: bool = False) -> None:
        self.name, self._loads = name, loads
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromCore).decode
        self._context: zmq.asyncio.Context | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._calls: dict[int, asyncio.Future[CoreReply]] = {}
        self._numbers = itertools.count()
        self._news: asyncio.Queue[Updates | Rejected | CoreLoad | None] = asyncio.Queue()
        self._cause: DeathCause | None = None
        self._loaded: asyncio.Future[Ready] | None = None
        self.ready: Ready | None = None

    async def connect(self, folder: str) -> Ready:
        """Wait until the core is loaded. folder: of its sockets. Raises EngineDeadError when `end` is called before."""
        self._open(folder)
        return await self._until_ready()

    def _open(self, folder: str) -> zmq.asyncio.Context:
        self._context = context = zmq.asyncio.Context(io_threads=1)
        self._answers = context.socket(zmq.DEALER)
        self._answers.set(zmq.ROUTING_ID, self.name.encode())
        self._requests = zmq.Context(context).socket(zmq.PUSH)  # never waits, so it needs no asyncio
        self._requests.set(zmq.SNDHWM, 0)
        self._answers.set(zmq.RECONNECT_IVL, _RETRY_MS)
        self._requests.set(zmq.RECONNECT_IVL, _RETRY_MS)
        self._answers.connect(address(folder, "answers"))
        self._requests.connect(address(folder, "requests"))
        self._tasks = [asyncio.create_task(self._receive(self._answers))]
        return context

    async def _until_ready(self) -> Ready:
        self._loaded = asyncio.get_running_loop().create_future()
        pause = _AGAIN
        try:
            while not self._loaded.done():  # the core gives up an answer that this process is too slow to take
                self._send(Hello(self._loads))
                await asyncio.wait({self._loaded}, timeout=pause)
                pause *= 2
            return self._loaded.result()
        finally:
            self._loaded.cancel()

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Send the siblings of one user's request. Raises EngineDeadError; a refusal comes as Rejected."""
        self._send(Add(list(requests)))

    def abort(self, ids: Iterable[str]) -> None:
        """Unknown ids are ignored. Raises EngineDeadError."""
        self._send(Abort(list(ids)))

    async def stats(self) -> CoreStats:
        """Answered between two steps. Raises EngineDeadError."""
        reply = await self._call(GetStats)
        assert reply.stats is not None
        return reply.stats

    async def engine_stats(self, seconds: float | None = None) -> list[CoreStats | None]:
        """Of each core, this one; None where it is gone, or takes longer to answer."""
        try:
            return [await asyncio.wait_for(self.stats(), seconds)]
        except (EngineDeadError, TimeoutError):
            return [None]

    async def reset_prefix_cache(self) -> bool:
        """False when the core could not. Raises EngineDeadError."""
        return (await self._call(ResetPrefixCache)).reset

    async def collective_rpc(self, call: Call, timeout: float | None = None) -> list[Any]:
        """See `EngineCore.collective_rpc`. Raises EngineDeadError, too."""
        reply = await self._call(lambda number: CallRanks(number, call, timeout))
        if reply.error is not None:
            raise RankCallError(reply.error)
        return reply.values

    async def sleep_order(self, order: SleepOrder) -> SleepState:
        """What comes of an order, once it is obeyed. Raises EngineDeadError."""
        reply = await self._call(lambda number: msgspec.structs.replace(order, call=number))
        assert reply.sleep is not None
        return reply.sleep

    @property
    def sleepers(self) -> list[Ask]:
        """Who is given orders to sleep: this core."""
        return [self.sleep_order]

    async def updates(self) -> AsyncIterator[Updates | Rejected | CoreLoad]:
        """What the core says of requests and its load, for one reader; ends when the core is closed. Raises
        EngineDeadError."""
        while (news := await self._news.get()) is not None:
            yield news
        if self._cause is not None and self._cause.kind != "closed":
            raise EngineDeadError(self._cause)

    def end(self, cause: DeathCause) -> None:
        """The core is gone: raise the cause in all that wait for it. Only the first cause counts."""
        if self._cause is not None:
            return
        self._cause = cause
        futures: list[asyncio.Future[Any] | None] = [self._loaded, *self._calls.values()]
        for waiting in futures:
            if waiting is not None and not waiting.done():
                waiting.set_exception(EngineDeadError(cause))
        self._news.put_nowait(None)

    def disconnect(self) -> None:
        """Nothing more is sent or received."""
        for task in self._tasks:
            task.cancel()
        if self._context is not None:
            self._requests.close(linger=0)  # of another view of the context, which does not know it
            self._context.destroy(linger=0)
            self._context = None

    async def _call(self, question: Callable[[int], msgspec.Struct]) -> CoreReply:
        number = next(self._numbers)
        self._send(question(number))
        self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            return await self._calls[number]
        finally:
            del self._calls[number]

    def _send(self, message: msgspec.Struct) -> None:
        if self._cause is not None:
            raise EngineDeadError(self._cause)
        self._send_bytes(self._encode(message))

    def _send_bytes(self, data: bytes) -> None:
        with contextlib.suppress(zmq.Again):  # the other end is gone, which will be reported
            self._requests.send_multipart([self.name.encode(), data], zmq.NOBLOCK)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            data = await socket.recv()
            try:
                message = self._decode(data)
            except msgspec.MsgspecError as e:
                self.end(DeathCause(kind="protocol", message=f"unreadable message of {len(data)} bytes: {e}"))
                return
            self._heard(message)

    def _heard(self, message: FromCore) -> None:
        match message:
            case Updates() | Rejected() | CoreLoad():
                self._news.put_nowait(message)
            case CoreReply(call):
                waiting = self._calls.get(call)
                if waiting is not None and not waiting.done():  # else the caller has gone
                    waiting.set_result(message)
            case Ready():
                self.ready = message
                if self._loaded is not None and not self._loaded.done():
                    self._loaded.set_result(message)
            case BadMessage(text):
                _log.warning("the engine core ignored a message it could not read: %s", text)
            case Dead(cause):
                self.end(cause)
            case Heartbeat():  # comes on a socket of its own, to the first front
                pass
