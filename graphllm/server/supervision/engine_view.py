"""The engine of a server as its routes see it: ready or why not, and what a request needs to know of the model."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import msgspec

from graphllm.chat.call import Style
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.config.server import ChatConfig, WatchConfig
from graphllm.engine.process.core_client import Health
from graphllm.engine.process.messages import EngineDeadError
from graphllm.engine.requests.request import CoreStats
from graphllm.engine.requests.text import Tokenizer
from graphllm.entrypoints.async_llm import AsyncLLM, EngineUnhealthyError
from graphllm.loading.artifact.model import ResolvedModel
from graphllm.server.http.errors import UnavailableError


@dataclass(frozen=True)
class SupervisorOptions:
    """seed: of requests without one.
    watch: how the engine is watched.
    chat: has the chat template, and how replies are read.
    silence: seconds without a heartbeat after which the engine counts as unresponsive.
    """

    seed: int | None = 0
    watch: WatchConfig = field(default_factory=WatchConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    silence: float = 8.0

    def style(self, tokenizer: Tokenizer) -> Style:
        """How the model's replies are read."""
        found = Style.of(tokenizer)
        tools, reasoning = self.chat.tool_call_parser, self.chat.reasoning_parser
        return Style(
            found.tools if tools == "auto" else None if tools == "none" else tools,
            found.reasoning if reasoning == "auto" else reasoning == "think",
        )


class CoreStatus(msgspec.Struct):
    """Of one engine core of several: starting, ready, unresponsive, stuck, dead, restarting. cause: why it is not
    ready."""

    status: str = "starting"
    cause: str | None = None


@dataclass(kw_only=True)
class EngineView:
    """status: starting, ready, degraded (some of several cores are ready), unresponsive, stuck, dead, restarting,
    draining. cause: why it is not ready. cores: of each, where there are several. phases: seconds of the latest start.
    was_ready: once. opened, style, defaults: the model, how its replies are read, the
    sampling parameters of requests that name none; from `take` on."""

    options: SupervisorOptions = SupervisorOptions()
    status: str = "starting"
    cause: str | None = None
    cores: list[CoreStatus] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    was_ready: asyncio.Event = field(default_factory=asyncio.Event)
    opened: ResolvedModel | None = None
    style: Style = field(default_factory=Style)
    defaults: SamplingParams = field(default_factory=SamplingParams)
    _engine: AsyncLLM | None = None
    _phase: str = "opening the model"
    _since: float = field(default_factory=time.monotonic)  # the status is this one

    def take(self, resolved: ResolvedModel) -> None:
        """The model is known. Raises ConfigError for a chat template that does not compile."""
        if (tokenizer := resolved.tokenizer) is not None:
            if (template := self.options.chat.chat_template) is not None:
                tokenizer = tokenizer.with_chat_template(template)
                resolved = resolved._replace(tokenizer=tokenizer)
            self.style = self.options.style(tokenizer)
        self.defaults = resolved.defaults
        self.opened = resolved

    def look(self) -> None:
        """See how the engine does; when it has broken, its requests fail."""

    def _become(self, status: str, cause: str | None = None) -> None:
        self.status, self.cause, self._since = status, cause, time.monotonic()

    @property
    def phase(self) -> str:
        """Of the start, for people."""
        return self._phase

    @property
    def engine(self) -> AsyncLLM:
        """For a new request. Raises UnavailableError."""
        self.look()
        if self.status in ("ready", "degraded"):
            assert self._engine is not None
            return self._engine
        messages = {"starting": f"the engine is starting: {self._phase}", "draining": "the server is shutting down"}
        lasted = round(time.monotonic() - self._since)  # as long again, for want of anything better
        raise UnavailableError(
            messages.get(self.status) or f"the engine is {self.status}: {self.cause}", max(1, min(30, lasted))
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
        return self.options.watch.restart_engine or self.status != "dead"

    @property
    def running(self) -> int:
        """Requests that are not finished."""
        return 0 if self._engine is None else self._engine.unfinished

    async def stats(self) -> list[CoreStats | None]:
        """Each core's figures; None for one that does not answer."""
        return [None]


def failure(health: Health) -> Exception:
    """What the requests of an engine that has broken fail with."""
    return EngineDeadError(health.cause) if health.cause is not None else EngineUnhealthyError(health)
