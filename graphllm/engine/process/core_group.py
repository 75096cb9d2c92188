"""CoreGroup: several engine cores of one model as if they were one; each request runs on one of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from graphllm.engine.metrics.total_stats import total
from graphllm.engine.process.core_client import CoreClient, Health
from graphllm.engine.process.messages import CoreLoad, DeathCause, EngineDeadError, Ready, Rejected, Updates
from graphllm.engine.process.remote_core import RemoteCore
from graphllm.engine.process.routing import Router
from graphllm.engine.process.sleepers import Ask, Sleepers
from graphllm.engine.requests.request import CoreStats, EngineRequest
from graphllm.runtime.commands.calls import Call

_log = logging.getLogger(__name__)
_GONE = DeathCause(kind="closed", message="the engine was shut down")
Client = CoreClient | RemoteCore


class Lost(NamedTuple):
    """The core of these requests is gone; others go on."""

    ids: list[str]
    cause: DeathCause


class CoreGroup(Sleepers):
    """A `CoreClient` over several cores, for one event loop.

    make: makes a client, not started, for the core of a number.
    count: cores.
    prefix: whether cores cache prefixes of prompts.

    A core that dies takes its own requests with it: `updates` gives them as Lost, and `restart` brings the core back.
    """

    def __init__(self, make: Callable[[int], Client], count: int, prefix: bool = True) -> None:
        self._make = make
        self._clients = [make(engine) for engine in range(count)]
        self._router = Router(count, prefix)
        self._news: asyncio.Queue[Updates | Rejected | Lost | None] = asyncio.Queue()
        self._pumps: dict[int, asyncio.Task[None]] = {}
        self.closed = False
        self.ready: Ready | None = None

    async def start(self) -> Ready:
        """Start all cores at the same time, except cores that are known to be gone. When one cannot be started, all end
        and its exception is raised."""
        there = [engine for engine, health in enumerate(self.healths()) if health.state != "dead"]
        starts = [asyncio.ensure_future(self._clients[engine].start()) for engine in there]
        try:
            found = await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            self.kill()
            raise
        for engine in there:
            self._listen(engine)
        # Any core may get any request, so the smallest one sets the limits.
        info = min((ready.info for ready in found), key=lambda info: info.capacity)
        info = msgspec.structs.replace(info, max_num_seqs=sum(ready.info.max_num_seqs for ready in found))
        self._router.set_sizes(info)
        phases = {name: max(ready.phases.get(name, 0.0) for ready in found) for name in found[0].phases}
        self.ready = Ready(info, phases)
        return self.ready

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Send the siblings of one user's request to one core. Raises EngineDeadError where none is there."""
        while True:
            alive = [client.health().state == "ready" for client in self._clients]
            engine = self._router.add(requests, alive)
            if engine is None:
                raise EngineDeadError(self.health().cause or _GONE)
            try:
                self._clients[engine].add(requests)
                return
            except EngineDeadError:  # it has died just now, so it is not ready at the next look
                for request in requests:
                    self._router.ended(request.id)

    def abort(self, ids: Iterable[str]) -> None:
        """End requests. Unknown ids and ids of cores that are gone are ignored."""
        by_engine: dict[int, list[str]] = {}
        for id in ids:
            if (engine := self._router.owner(id)) is not None:
                by_engine.setdefault(engine, []).append(id)
        for engine, some in by_engine.items():
            with contextlib.suppress(EngineDeadError):  # what it had is lost, which `updates` tells
                self._clients[engine].abort(some)

    async def updates(self) -> AsyncIterator[Updates | Rejected | Lost]:
        """What the cores say of requests, for one reader; ends when the group is closed."""
        while (news := await self._news.get()) is not None:
            yield news

    def requests_of(self, engine: int) -> list[str]:
        """Ids of what runs on a core."""
        return self._router.of(engine)

    def health(self) -> Health:
        """Ready while one core is; else the state of the first one."""
        found = self.healths()
        return next((health for health in found if health.state == "ready"), found[0])

    def healths(self) -> list[Health]:
        """Of each core."""
        return [client.health() for client in self._clients]

    @property
    def folders(self) -> list[str]:
        """Of each core's sockets; "" for one that has not been started yet."""
        return [client.folder for client in self._clients]

    async def stats(self) -> CoreStats:
        """Of all together. Raises EngineDeadError where none answers."""
        found = [stats for stats in await self.engine_stats() if stats is not None]
        if not found:
            raise EngineDeadError(self.health().cause or _GONE)
        return total(found)

    async def engine_stats(self, seconds: float | None = None) -> list[CoreStats | None]:
        """Of each core; None for one that is not ready, or takes longer to answer."""

        async def ask(client: Client) -> CoreStats | None:
            if client.health().state != "ready":
                return None
            try:
                return await asyncio.wait_for(client.stats(), seconds)
            except (EngineDeadError, TimeoutError):
                return None

        return list(await asyncio.gather(*map(ask, self._clients)))

    async def reset_prefix_cache(self) -> bool:
        """False when one of them could not. Raises EngineDeadError where none is there."""
        there = [engine for engine, health in enumerate(self.healths()) if health.state == "ready"]
        if not there:
            raise EngineDeadError(self.health().cause or _GONE)
        done = await asyncio.gather(*(self._clients[engine].reset_prefix_cache() for engine in there))
        self._router.forget(engine for engine, one in zip(there, done, strict=True) if one)
        return all(done)

    @property
    def sleepers(self) -> list[Ask]:
        """The cores that are given orders to sleep: all that are there. Raises EngineDeadError where none is."""
        there = [engine for engine, health in enumerate(self.healths()) if health.state == "ready"]
        if not there:
            raise EngineDeadError(self.health().cause or _GONE)
        return [self._clients[engine].sleep_order for engine in there]

    async def sleep(self, level: object = 1, mode: object = "abort") -> None:
        """As of one core: all sleep, or none."""
        await super().sleep(level, mode)
        self._router.forget(range(len(self._clients)))

    async def collective_rpc(self, call: Call, timeout: float | None = None) -> list[Any]:
        """Of the ranks of all cores. Raises as one core does."""
        by_core = await asyncio.gather(*(client.collective_rpc(call, timeout) for client in self._clients))
        return [value for values in by_core for value in values]

    async def restart(self, engine: int) -> None:
        """End a core, whatever it does, and start another one in its place. Raises what its start raises."""
        await self._clients[engine].destroy()
        pump = self._pumps.pop(engine, None)
        if pump is not None:
            await pump
        self._router.replaced(engine)
        client = self._clients[engine] = self._make(engine)
        await client.start()
        if self.closed:
            client.kill(0)
            return
        self._listen(engine)

    def lose(self, engine: int, cause: DeathCause) -> None:
        """Somebody who knows says that a core does not answer; `restart` joins it, or another one, again."""
        self.abort(self._router.of(engine))  # if it goes on, not with these
        self._clients[engine].end(cause)

    async def close(self, drain_timeout: float = 0.0) -> None:
        """End all cores. drain_timeout: seconds in which they may finish their requests."""
        self.closed = True
        await asyncio.gather(*(client.close(drain_timeout) for client in self._clients))
        await asyncio.gather(*self._pumps.values())
        self._news.put_nowait(None)

    def kill(self, grace: float | None = None) -> None:
        """End all cores without asking, as `CoreClient.kill` does."""
        self.closed = True
        for client in self._clients:
            client.kill(grace)
        self._news.put_nowait(None)

    def _listen(self, engine: int) -> None:
        self._pumps[engine] = asyncio.create_task(self._pump(engine, self._clients[engine]))

    async def _pump(self, engine: int, client: Client) -> None:
        """Pass on what a core says, until it is gone."""
        router = self._router
        cause = _GONE
        try:
            async for news in client.updates():
                match news:
                    case CoreLoad(sequences):
                        router.reported(engine, sequences)
                        continue
                    case Rejected(ids):
                        for id in ids:
                            router.ended(id)
                    case Updates(updates):
                        for update in updates:
                            if update.finish_reason is not None:
                                router.ended(update.id)
                            else:
                                router.began(update.id)
                self._news.put_nowait(news)
        except EngineDeadError as death:
            cause = death.cause
        if ids := router.of(engine):
            for id in ids:
                router.ended(id)
            self._news.put_nowait(Lost(ids, cause))
