"""EngineFollower: the engine as a front sees it, by the states that the controller sends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from graphllm.config import CoreConfig
from graphllm.engine.process.core_group import CoreGroup
from graphllm.engine.process.messages import DeathCause, EngineDeadError
from graphllm.engine.process.remote_core import RemoteCore
from graphllm.engine.requests.text import Tokenizer
from graphllm.entrypoints.async_llm import AsyncLLM
from graphllm.entrypoints.streaming.streams import UNREAD
from graphllm.loading.artifact.model import ResolvedModel
from graphllm.server.process.fronts.messages import EngineState, ServedModel
from graphllm.server.supervision.engine_supervisor import warm
from graphllm.server.supervision.engine_view import EngineView, failure

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class EngineFollower(EngineView):
    """name: of this front; number: the same, as a number. fronts: how many there are. joined: hears of each engine that
    requests go to from here. broken: set when only another process can help."""

    name: str
    number: int
    fronts: int
    joined: Callable[[list[str]], None]
    broken: asyncio.Event = field(default_factory=asyncio.Event)
    _state: EngineState | None = None
    _folders: list[str] = field(default_factory=list)  # of the cores that this front is connected to
    _joining: AsyncLLM | None = None
    _opening: asyncio.Task[None] | None = None
    _work: asyncio.Task[None] | None = None
    _coming: dict[int, tuple[str, asyncio.Task[None]]] = field(default_factory=dict)  # cores of several, joined again

    def follow(self, state: EngineState) -> None:
        """Do what follows from a new state."""
        before, self._state = self._state, state
        self._show()
        if state.model is not None and self._opening is None:
            self._opening = asyncio.create_task(self._open(state.model))
        if len(self._folders) > 1:
            self._follow_cores(state)
        elif before is None or state.folders != before.folders:
            self.leave()
            self._work = asyncio.create_task(self._join(state.folders))

    def leave(self) -> None:
        """Leave the engine; what still runs here fails."""
        if self._work is not None and self._joining is None:
            self._work.cancel()  # else it ends with the engine that it joins
        for engine in (self._joining, self._engine):
            if engine is not None:
                engine.shutdown()
        self._joining, self._folders = None, []

    def look(self) -> None:
        """Whether this front's own part has failed, which the controller cannot know."""
        if self.status == "ready" and self._engine is not None and self._engine.errored and not self.cores:
            _log.error("this process cannot go on: %s", self._engine.dead_error)
            self.broken.set()

    def _show(self) -> None:
        state = self._state
        assert state is not None
        self.phases, self._phase = state.phases, state.phase
        if state.was_ready:
            self.was_ready.set()
        if state.status in ("ready", "degraded") and not self._joined(state.folders):
            return  # not here
        self.cores = state.cores
        if (state.status, state.cause) == (self.status, self.cause):
            return
        self._become(state.status, state.cause)
        if state.health is not None and self._engine is not None:
            self._engine.fail_requests(failure(state.health))

    async def _join(self, folders: list[str]) -> None:
        """Connect to the engine with the sockets of its cores there; without folders, to none."""
        try:
            if not any(folders) or await self._connect(folders):
                self.joined(folders)
        except EngineDeadError:
            pass  # the next state says what comes now
        except Exception:
            _log.exception("this process cannot go on")
            self.broken.set()

    def _joined(self, folders: list[str]) -> bool:
        """Whether this front is connected to these; of several, to those that are there."""
        return bool(self._folders) if len(folders) > 1 else self._folders == folders

    async def _connect(self, folders: list[str]) -> bool:
        """False when another state has come since."""
        assert self._opening is not None
        await asyncio.shield(self._opening)
        assert self.opened is not None
        seed = self.options.seed
        seed = None if seed is None else seed + (self.number << 64)  # other ones than in every front before this
        engine = AsyncLLM.for_shared_core(self._client(folders, self.opened), self.opened, seed, UNREAD // self.fronts)
        self._joining = engine
        await engine.start()
        if self._joining is not engine:
            return False
        self._engine, self._joining, self._folders = engine, None, list(folders)
        self._show()
        return True

    def _client(self, folders: list[str], opened: ResolvedModel) -> RemoteCore | CoreGroup:
        if len(folders) == 1:
            return RemoteCore(self.name, folders[0])

        def make(number: int) -> RemoteCore:
            assert self._state is not None
            return RemoteCore(self.name, self._state.folders[number], loads=self.fronts > 1)

        return CoreGroup(make, len(folders), opened.config.scheduler.enable_prefix_caching)

    def _follow_cores(self, state: EngineState) -> None:
        """Of several cores, leave the cores that are gone and join the cores that have come."""
        assert self._engine is not None
        for number, (ours, theirs) in enumerate(zip(self._folders, state.folders, strict=True)):
            last, task = self._coming.get(number, (ours, None))
            if theirs == last:
                continue
            self._engine.cores.lose(number, DeathCause(kind="exit", message=state.cores[number].cause or "it is gone"))
            self._folders[number] = ""
            if theirs:
                joining = asyncio.create_task(self._join_core(self._engine, number, theirs, task))
                self._coming[number] = theirs, joining
            self.joined(list(self._folders))

    async def _join_core(self, engine: AsyncLLM, number: int, folder: str, before: asyncio.Task[None] | None) -> None:
        """before: the one that joined another core in this place; it ends, as that one is lost."""
        if before is not None:
            await before
        with contextlib.suppress(EngineDeadError):  # else the next state says what comes now
            await engine.cores.restart(number)
            self._folders[number] = folder
            self.joined(list(self._folders))
        if self._coming[number][0] == folder:
            del self._coming[number]

    async def _open(self, model: ServedModel) -> None:
        config = msgspec.convert(model.config, CoreConfig)
        tokenizer = None
        if model.tokenizer is not None:
            tokenizer = await asyncio.to_thread(Tokenizer.from_folder, *model.tokenizer)
        self.take(ResolvedModel(config, tokenizer, model.defaults, [], model.name, model.vectors))
        assert self.opened is not None
        await asyncio.to_thread(warm, self.opened.tokenizer)
