"""ReplicatedCore: engine cores in processes of their own, for whoever drives one core step by step, such as `LLM`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from graphllm.config import ConfigError
from graphllm.engine.process.core_client import CoreClient
from graphllm.engine.process.core_group import CoreGroup, Lost
from graphllm.engine.process.messages import CoreLoad, EngineDeadError, Rejected, Updates
from graphllm.engine.requests.request import CoreStats, EngineCoreOutput, EngineRequest
from graphllm.loading.artifact.model import ResolvedModel
from graphllm.loading.core.core_clients import core_client
from graphllm.runtime.commands.calls import Call

_T = TypeVar("_T")


class ReplicatedCore:
    """Is stepped as `EngineCore` is: a step waits for news of any core, while the cores run on.

    A request ends with an error when it is refused, and when its core dies. phases: is called with the name and the
    seconds of each start-up phase.
    Raises ConfigError for settings that cannot be loaded, and EngineDeadError.
    """

    def __init__(self, resolved: ResolvedModel, phases: Callable[[str, float], None]) -> None:
        if resolved.processors:
            raise ConfigError(
                f"logits_processors has {resolved.processors[0]!r}: functions cannot cross to the processes of "
                'data_parallel_size cores; give "package.module:name"'
            )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="graphllm-cores", daemon=True)
        self._thread.start()
        self._news: queue.SimpleQueue[list[EngineCoreOutput] | BaseException] = queue.SimpleQueue()
        self._live: set[str] = set()
        self._client: CoreGroup | CoreClient | None = None
        self.kernels_done = 0
        try:
            ready = self._wait(self._start(resolved))
        except BaseException:
            self.close()
            raise
        self.info = ready.info
        for name, seconds in ready.phases.items():
            phases(name, seconds)

    @property
    def unfinished(self) -> int:
        """Requests that have not ended yet."""
        return len(self._live)

    def add(self, request: EngineRequest) -> None:
        """Send a request to the core that has the least to do."""
        self._live.add(request.id)
        self._call(self._add, request)

    def abort(self, ids: Iterable[str]) -> None:
        """Unknown ids are ignored."""
        if there := [id for id in ids if id in self._live]:
            self._call(self._abort, there)

    def step(self) -> list[EngineCoreOutput]:
        """Wait for news, and take all there are. Raises what the cores have failed with."""
        found: list[EngineCoreOutput] = []
        while True:
            news = self._news.get()
            if isinstance(news, BaseException):
                raise news
            found += news
            if self._news.empty():
                break
        for update in found:
            if update.finish_reason is not None:
                self._live.discard(update.id)
        return found

    def stats(self) -> CoreStats:
        """Of all cores together. Raises EngineDeadError."""
        assert self._client is not None
        return self._wait(self._client.stats())

    def engine_stats(self) -> list[CoreStats | None]:
        """Of each core; None for one that is gone."""
        assert self._client is not None
        return self._wait(self._client.engine_stats())

    def reset_prefix_cache(self) -> bool:
        """False when one of them could not."""
        assert self._client is not None
        return self._wait(self._client.reset_prefix_cache())

    def sleep(self, level: object = 1, mode: object = "abort") -> None:
        """Of all cores, or of none."""
        assert self._client is not None
        self._wait(self._client.sleep(level, mode))

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Of all cores, or of none; whether all of their memory is there now."""
        assert self._client is not None
        return self._wait(self._client.wake_up(tags))

    def is_sleeping(self) -> bool:
        """Whether any of them sleeps."""
        assert self._client is not None
        return self._wait(self._client.is_sleeping())

    def release_kv_cache_memory(self) -> None:
        """Of all cores, or of none."""
        assert self._client is not None
        self._wait(self._client.release_kv_cache_memory())

    def collective_rpc(self, call: Call, timeout: float | None = None) -> list[Any]:
        """Of the ranks of all cores."""
        assert self._client is not None
        return self._wait(self._client.collective_rpc(call, timeout))

    def warm_up(self) -> bool:
        """The processes do that themselves."""
        return False

    def check_health(self) -> None:
        """Raises EngineDeadError when all cores are gone."""
        assert self._client is not None
        if (cause := self._client.health().cause) is not None:
            raise EngineDeadError(cause)

    wakeup_fd = None

    def hear(self) -> None:
        """Nothing is to be done without requests."""

    def close(self) -> None:
        """End the processes."""
        if self._loop.is_closed():
            return
        if self._client is not None:
            self._wait(self._client.close())
        self._call(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ---- in the thread of the loop

    async def _start(self, resolved: ResolvedModel) -> Any:
        config = resolved.config
        self._client = core_client(config)
        ready = await self._client.start()
        self._reading = asyncio.create_task(self._read(self._client))
        return ready

    def _add(self, request: EngineRequest) -> None:
        assert self._client is not None
        try:
            self._client.add([request])
        except EngineDeadError as death:
            self._news.put([_failed(request.id, str(death))])

    def _abort(self, ids: list[str]) -> None:
        assert self._client is not None
        self._client.abort(ids)

    async def _read(self, client: CoreGroup | CoreClient) -> None:
        try:
            async for news in client.updates():
                match news:
                    case Updates(updates):
                        self._news.put(updates)
                    case Rejected(ids, message):
                        self._news.put([_failed(id, message) for id in ids])
                    case Lost(ids, cause):
                        self._news.put([_failed(id, str(EngineDeadError(cause))) for id in ids])
                    case CoreLoad():
                        pass
        except BaseException as failure:
            self._news.put(failure)
            raise

    # ---- from other threads

    def _call(self, work: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(work, *arguments)

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        future: concurrent.futures.Future[_T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result()


def _failed(id: str, message: str) -> EngineCoreOutput:
    return EngineCoreOutput(id, [], "error", error=message)
