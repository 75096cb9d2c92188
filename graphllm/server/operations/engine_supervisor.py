"""The engine of a server: opened and started while HTTP already answers, watched, failed in public, restarted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Literal

from graphllm.config import ConfigError
from graphllm.config.sampling import SamplingParams
from graphllm.engine.client import Health
from graphllm.engine.messages import EngineDeadError
from graphllm.engine.request import CoreStats
from graphllm.engine.spawn import Child
from graphllm.engine.text import Tokenizer
from graphllm.entrypoints.async_llm import AsyncLLM, EngineUnhealthyError
from graphllm.entrypoints.model import ResolvedModel
from graphllm.server.chat.call import Style
from graphllm.server.http.errors import UnavailableError

_log = logging.getLogger(__name__)
_TICK = 0.25  # seconds between two looks at the engine
_SAY = 2.0  # seconds of start-up without another line in the log
_BACKOFF = (1.0, 60.0)  # seconds before a restart after another one failed: the first, and at most
_STATS_TIMEOUT = 1.0  # seconds that a question to the core may take; it answers between two steps


@dataclass(frozen=True)
class SupervisorOptions:
    """seed: of requests without one. restart: bring a dead engine back. step_timeout: seconds of one step, without the
    end of a kernel, after which the engine counts as stuck. tool_parser, reasoning_parser: "auto" follows the chat
    template. silence: seconds without a heartbeat. chat_template: in place of the checkpoint's."""

    seed: int | None = 0
    restart: bool = False
    step_timeout: float = 8.0
    tool_parser: Literal["auto", "hermes", "llama3", "mistral", "none"] = "auto"
    reasoning_parser: Literal["auto", "think", "none"] = "auto"
    silence: float = 8.0
    chat_template: str | None = None

    def style(self, tokenizer: Tokenizer) -> Style:
        """How the model's replies are read."""
        found = Style.of(tokenizer)
        tools, reasoning = self.tool_parser, self.reasoning_parser
        return Style(
            found.tools if tools == "auto" else None if tools == "none" else tools,
            found.reasoning if reasoning == "auto" else reasoning == "think",
        )


@dataclass
class EngineSupervisor:
    """One engine after another for the same model. open: finds the model, in a thread. child: the first one's process,
    already started."""

    open: Callable[[], ResolvedModel]
    options: SupervisorOptions = SupervisorOptions()
    child: Child | None = None
    status: str = "starting"
    cause: str | None = None
    phases: dict[str, float] = field(default_factory=dict)  # seconds, of the latest start
    was_ready: asyncio.Event = field(default_factory=asyncio.Event)  # once
    opened: ResolvedModel | None = None
    style: Style = field(default_factory=Style)
    defaults: SamplingParams = field(default_factory=SamplingParams)
    _engine: AsyncLLM | None = None
    _phase: str = "opening the model"
    _since: float = field(default_factory=time.monotonic)  # the status is this one

    async def run(self) -> None:
        """Open and start the engine, then watch it until cancelled. Raises ConfigError for a model that cannot be
        loaded, EngineDeadError when the first start fails otherwise."""
        async with self._announced():
            begun = time.monotonic()
            self.opened = await asyncio.to_thread(self.open)
            if (tokenizer := self.opened.tokenizer) is not None:
                if (template := self.options.chat_template) is not None:
                    tokenizer = tokenizer.with_chat_template(template)
                    self.opened = self.opened._replace(tokenizer=tokenizer)
                self.style = self.options.style(tokenizer)
            self.defaults = self.opened.defaults
            self.phases["open"] = time.monotonic() - begun
            # While the engine loads, in its own process: else the first request would wait for it.
            warming = asyncio.create_task(asyncio.to_thread(_warm, self.opened.tokenizer))
            await self._start()
            await warming
        while True:
            await asyncio.sleep(_TICK)
            self.look()
            if self.options.restart and self.status not in ("ready", "draining"):
                await self._restart()

    async def _start(self) -> None:
        assert self.opened is not None
        self._phase = "loading the engine"
        options = self.options
        child, self.child = self.child, None  # one process loads one engine
        engine = AsyncLLM.from_resolved(self.opened, options.seed, options.silence, options.step_timeout, child)
        try:
            await engine.start()
        except BaseException:
            engine.shutdown()
            raise
        assert engine.ready is not None
        self._engine = engine
        self.phases |= {f"engine {name}": seconds for name, seconds in engine.ready.phases.items()}
        self.was_ready.set()
        self._become("ready")

    def look(self) -> None:
        """See how the engine does; when it has broken, its requests fail."""
        engine = self._engine
        if engine is None or self.status in ("restarting", "draining"):
            return
        health = engine.health()
        if health.state == self.status:
            return
        if health.state == "ready":
            _log.info("the engine answers again")
            self._become("ready")
            return
        self._become(health.state, _cause(health, self.options))
        failed = engine.fail_requests(_error(health))
        _log.error("the engine is %s: %s; %d requests failed", health.state, self.cause, failed)

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
        self.status, self.cause, self._since = status, cause, time.monotonic()

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

    @property
    def engine(self) -> AsyncLLM:
        """For a new request. Raises UnavailableError."""
        self.look()
        if self.status == "ready":
            assert self._engine is not None
            return self._engine
        told = {"starting": f"the engine is starting: {self._phase}", "draining": "the server is shutting down"}
        lasted = round(time.monotonic() - self._since)  # as long again, for want of anything better
        raise UnavailableError(
            told.get(self.status) or f"the engine is {self.status}: {self.cause}", max(1, min(30, lasted))
        )

    @property
    def ready(self) -> bool:
        """It takes requests."""
        try:
            return self.engine is not None
        except UnavailableError:
            return False

    @property
    def live(self) -> bool:
        """False when only a new process can help."""
        return self.options.restart or self.status != "dead"

    @property
    def running(self) -> int:
        """Requests that are not finished."""
        return 0 if self._engine is None else self._engine.unfinished

    async def stats(self) -> CoreStats | None:
        """The core's figures; None when it does not answer."""
        if self._engine is not None and self.status in ("ready", "draining"):
            with contextlib.suppress(EngineDeadError, TimeoutError):
                return await asyncio.wait_for(self._engine.stats(), _STATS_TIMEOUT)
        return None

    def drain(self) -> None:
        """Take no more requests."""
        self._become("draining", "the server is shutting down")

    def kill(self) -> None:
        """End the engine's process at once."""
        if self._engine is not None:
            self._engine.shutdown(grace=0)

    async def close(self) -> None:
        """End the engine; streams that are open end with an error."""
        if self._engine is not None:
            await self._engine.close()


def _warm(tokenizer: Tokenizer | None) -> None:
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
            f"--step-timeout (now {options.step_timeout:g} s) or lower --max-num-batched-tokens"
        )
    return f"the engine's process has been silent for {health.seconds:.1f} s"


def _error(health: Health) -> Exception:
    return EngineDeadError(health.cause) if health.cause is not None else EngineUnhealthyError(health)
