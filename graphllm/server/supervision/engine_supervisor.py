"""The engine of a server: opened and started while HTTP already answers, watched, failed in public, restarted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from graphllm.config import ConfigError
from graphllm.engine.process.core_client import Health
from graphllm.engine.process.messages import EngineDeadError
from graphllm.engine.process.spawn import Child
from graphllm.engine.requests.request import CoreStats
from graphllm.engine.requests.text import Tokenizer
from graphllm.entrypoints.async_llm import AsyncLLM
from graphllm.loading.artifact.model import ResolvedModel
from graphllm.server.supervision.engine_view import CoreStatus, EngineView, SupervisorOptions, failure

_log = logging.getLogger(__name__)
_TICK = 0.25  # seconds between two looks at the engine
_SAY = 2.0  # seconds of start-up without another line in the log
_BACKOFF = (1.0, 60.0)  # seconds before a restart after another one failed: the first, and at most
_STATS_TIMEOUT = 1.0  # seconds that a question to the core may take; it answers between two steps


@dataclass(kw_only=True)
class EngineSupervisor(EngineView):
    """One engine after another for the same model; of one with several cores, each by itself. open: finds the model, in
    a thread. children: processes of the first one's cores, already started. changed: set whenever somebody who watches
    would see something new. broken: how the engine is that has failed its requests, None while there is none."""

    open: Callable[[], ResolvedModel]
    children: Sequence[Child] = ()
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    broken: Health | None = None
    _restarts: dict[int, asyncio.Task[None]] = field(default_factory=dict)  # of single cores, that are under way

    async def run(self) -> None:
        """Open and start the engine, then watch it until cancelled. Raises ConfigError for a model that cannot be
        loaded, EngineDeadError when the first start fails otherwise."""
        async with self._announced():
            begun = time.monotonic()
            self.take(await asyncio.to_thread(self.open))
            assert self.opened is not None
            self.phases["open"] = time.monotonic() - begun
            self.changed.set()
            # While the engine loads, in its own process: else the first request would wait for it.
            warming = asyncio.create_task(asyncio.to_thread(warm, self.opened.tokenizer))
            await self._start()
            await warming
        while True:
            await asyncio.sleep(_TICK)
            self.look()
            if not self.options.watch.restart_engine or self.status == "draining":
                continue
            if not self.cores and self.status != "ready":
                await self._restart()
            for number, core in enumerate(self.cores):
                if core.status not in ("ready", "restarting"):
                    self._restarts[number] = asyncio.create_task(self._restart_core(number))

    async def _start(self) -> None:
        assert self.opened is not None
        self._phase = "loading the engine"
        self.changed.set()
        options = self.options
        children, self.children = self.children, ()  # one process loads one engine
        engine = AsyncLLM.from_resolved(
            self.opened, options.seed, options.silence, options.watch.step_timeout, children
        )
        try:
            await engine.start()
        except BaseException:
            engine.shutdown()
            raise
        assert engine.ready is not None
        self._engine, self.broken = engine, None
        self.phases |= {f"engine {name}": seconds for name, seconds in engine.ready.phases.items()}
        self.was_ready.set()
        count = self.opened.config.parallel.cores
        self.cores = [CoreStatus("ready") for _ in range(count)] if count > 1 else []
        self._become("ready")

    def look(self) -> None:
        """See how the engine does; when it has broken, its requests fail."""
        engine = self._engine
        if engine is None or self.status in ("restarting", "draining"):
            return
        if self.cores:
            for number, health in enumerate(engine.cores.healths()):
                self._look_at(number, health, engine)
            return
        health = engine.health()
        if health.state == self.status:
            return
        if health.state == "ready":
            _log.info("the engine answers again")
            self.broken = None
            self._become("ready")
            return
        self.broken = health
        self._become(health.state, _cause(health, self.options))
        failed = engine.fail_requests(failure(health))
        _log.error("the engine is %s: %s; %d requests failed", health.state, self.cause, failed)

    def _look_at(self, number: int, health: Health, engine: AsyncLLM) -> None:
        """See how one of several cores does."""
        status = self.cores[number].status
        if status == "restarting" or health.state == status:
            return
        if health.state == "ready":
            _log.info("engine core %d answers again", number)
            self._core_becomes(number, "ready")
            return
        cause = _cause(health, self.options)
        engine.cores.fail_requests(failure(health), number)
        _log.error("engine core %d is %s: %s; its requests failed", number, health.state, cause)
        self._core_becomes(number, health.state, cause)

    def _core_becomes(self, number: int, status: str, cause: str | None = None) -> None:
        """And what the engine is by that: as good as its best core, degraded where that is not all."""
        self.cores[number] = CoreStatus(status, cause)
        if self.status == "draining":
            return
        ready = sum(core.status == "ready" for core in self.cores)
        causes = "; ".join(f"engine core {n}: {core.cause}" for n, core in enumerate(self.cores) if core.cause)
        if ready == len(self.cores):
            self._become("ready")
        elif ready:
            self._become("degraded", causes)
        else:
            self._become("dead" if any(c.status == "dead" for c in self.cores) else status, causes)
        self.changed.set()

    async def _restart_core(self, number: int) -> None:
        """Bring one of several cores back; the others go on."""
        assert self._engine is not None
        pause, most = _BACKOFF
        self._core_becomes(number, "restarting", self.cores[number].cause)
        while True:
            begun = time.monotonic()
            try:
                await self._engine.cores.restart(number)
            except (ConfigError, EngineDeadError) as failure:
                cause = f"{self.cores[number].cause}; it could not be started again: {failure}"[-1000:]
                _log.error("restart of engine core %d failed, next try in %.0f s: %s", number, pause, failure)
                self._core_becomes(number, "restarting", cause)
                await asyncio.sleep(pause)
                pause = min(2 * pause, most)
                continue
            _log.info("engine core %d was restarted in %.2f s", number, time.monotonic() - begun)
            self._core_becomes(number, "ready")
            return

    async def _restart(self) -> None:
        assert self._engine is not None
        pause, most = _BACKOFF
        self._become("restarting", self.cause)
        self._engine.shutdown(grace=0)  # it does not answer, or is gone
        while True:
            begun = time.monotonic()
            try:
                async with self._announced():
                    await self._start()
            except (ConfigError, EngineDeadError) as failure:
                self.cause = f"{self.cause}; it could not be started again: {failure}"[-1000:]
                _log.error("restart failed, next try in %.0f s: %s", pause, failure)
                await asyncio.sleep(pause)
                pause = min(2 * pause, most)
                continue
            _log.info("the engine was restarted in %.2f s", time.monotonic() - begun)
            return

    def _become(self, status: str, cause: str | None = None) -> None:
        super()._become(status, cause)
        self.changed.set()

    @property
    def folders(self) -> list[str]:
        """Of the sockets of each core of a loaded engine, "" for one of several that is not ready; none while there is
        no engine."""
        if self._engine is None or (not self.cores and self.status in ("restarting", "dead")):
            return []
        if not self.cores:
            return self._engine.cores.folders
        ready = [core.status == "ready" for core in self.cores]
        return [folder if there else "" for folder, there in zip(self._engine.cores.folders, ready, strict=True)]

    @contextlib.asynccontextmanager
    async def _announced(self) -> AsyncIterator[None]:
        """While this runs the log says every two seconds what is going on."""
        begun = time.monotonic()

        async def say() -> None:
            while True:
                await asyncio.sleep(_SAY)
                _log.info("still %s, %.0f s", self._phase, time.monotonic() - begun)

        saying = asyncio.create_task(say())
        try:
            yield
        finally:
            saying.cancel()

    async def stats(self) -> list[CoreStats | None]:
        """Each core's figures; None for one that does not answer."""
        if self._engine is not None and self.status in ("ready", "degraded", "draining"):
            return await self._engine.cores.stats(_STATS_TIMEOUT)
        return [None] * max(1, len(self.cores))

    def drain(self) -> None:
        """Take no more requests."""
        self._become("draining", "the server is shutting down")

    def kill(self) -> None:
        """End the engine's process at once."""
        if self._engine is not None:
            self._engine.shutdown(grace=0)

    async def close(self) -> None:
        """End the engine; streams that are open end with an error."""
        for restart in self._restarts.values():
            restart.cancel()
        await asyncio.gather(*self._restarts.values(), return_exceptions=True)
        if self._engine is not None:
            await self._engine.close()


def warm(tokenizer: Tokenizer | None) -> None:
    """Import and compile what a chat needs."""
    if tokenizer is not None and tokenizer.chat_template:
        with contextlib.suppress(ConfigError):  # some templates want more than this
            tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": "x"}]))


def _cause(health: Health, options: SupervisorOptions) -> str:
    if health.cause is not None:
        return health.cause.message
    if health.state == "stuck":
        return (
            f"one step has not got on for {health.seconds:.1f} s; if kernels of this model take that long, raise "
            f"--step-timeout (now {options.watch.step_timeout:g} s) or lower --max-num-batched-tokens"
        )
    return f"the engine's process has been silent for {health.seconds:.1f} s"
