"""EngineFollower: the engine as a front sees it, who is told of it by the controller."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from graphllm.config import CoreConfig
from graphllm.engine.messages import EngineDeadError
from graphllm.engine.remote import RemoteCore
from graphllm.engine.text import Tokenizer
from graphllm.entrypoints.async_llm import UNREAD, AsyncLLM
from graphllm.entrypoints.model import ResolvedModel
from graphllm.server.fronts.messages import EngineState, Model
from graphllm.server.operations.engine_supervisor import warm
from graphllm.server.operations.engine_view import EngineView, failure

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class EngineFollower(EngineView):
    """name: of this front; number: the same, as a number. fronts: how many there are. joined: hears of each engine that
    requests go to from here. broken: set when only another process can help."""

    name: str
    number: int
    fronts: int
    joined: Callable[[str], None]
    broken: asyncio.Event = field(default_factory=asyncio.Event)
    _told: EngineState | None = None
    _core: str = ""  # that this front is connected to
    _joining: AsyncLLM | None = None
    _opening: asyncio.Task[None] | None = None
    _work: asyncio.Task[None] | None = None

    def told(self, state: EngineState) -> None:
        """Do what follows from a new state."""
        before, self._told = self._told, state
        self._show()
        if state.model is not None and self._opening is None:
            self._opening = asyncio.create_task(self._open(state.model))
        if before is None or state.core != before.core:
            self.leave()
            self._work = asyncio.create_task(self._join(state.core))

    def leave(self) -> None:
        """Leave the engine; what still runs here fails."""
        if self._work is not None and self._joining is None:
            self._work.cancel()  # else it ends with the engine that it joins
        for engine in (self._joining, self._engine):
            if engine is not None:
                engine.shutdown()
        self._joining, self._core = None, ""

    def look(self) -> None:
        """Whether this front's own part has failed, which the controller cannot know."""
        if self.status == "ready" and self._engine is not None and self._engine.errored:
            _log.error("this process cannot go on: %s", self._engine.dead_error)
            self.broken.set()

    def _show(self) -> None:
        state = self._told
        assert state is not None
        self.phases, self._phase = state.phases, state.phase
        if state.was_ready:
            self.was_ready.set()
        if state.status == "ready" and self._core != state.core:
            return  # not here
        if (state.status, state.cause) == (self.status, self.cause):
            return
        self._become(state.status, state.cause)
        if state.health is not None and self._engine is not None:
            self._engine.fail_requests(failure(state.health))

    async def _join(self, core: str) -> None:
        """Connect to the engine whose sockets are there, "" for none."""
        try:
            if not core or await self._connect(core):
                self.joined(core)
        except EngineDeadError:
            pass  # the next state says what comes now
        except Exception:
            _log.exception("this process cannot go on")
            self.broken.set()

    async def _connect(self, core: str) -> bool:
        """False when there is another state meanwhile."""
        assert self._opening is not None
        await asyncio.shield(self._opening)
        assert self.opened is not None
        seed = self.options.seed
        seed = None if seed is None else seed + (self.number << 64)  # other ones than in every front before this
        engine = AsyncLLM.beside(RemoteCore(self.name, core), self.opened, seed, UNREAD // self.fronts)
        self._joining = engine
        await engine.start()
        if self._joining is not engine:
            return False
        self._engine, self._joining, self._core = engine, None, core
        self._show()
        return True

    async def _open(self, model: Model) -> None:
        config = msgspec.convert(model.config, CoreConfig)
        tokenizer = None
        if model.tokenizer is not None:
            tokenizer = await asyncio.to_thread(Tokenizer.from_folder, *model.tokenizer)
        self.take(ResolvedModel(config, tokenizer, model.defaults, [], model.name, model.vectors))
        assert self.opened is not None
        await asyncio.to_thread(warm, self.opened.tokenizer)
