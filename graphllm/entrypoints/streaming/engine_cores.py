"""The single cores of an engine, for a process that watches and replaces them; `AsyncLLM.cores`."""

from __future__ import annotations

from graphllm.engine.process.core_client import CoreClient, Health
from graphllm.engine.process.core_group import CoreGroup
from graphllm.engine.process.messages import DeathCause
from graphllm.engine.process.remote_core import RemoteCore
from graphllm.engine.requests.request import CoreStats
from graphllm.entrypoints.streaming.streams import RequestStreams


class EngineCores:
    """client: of one core or several. streams: of the requests that they run. `restart`, `lose` and `fail_requests`
    are for an engine of several."""

    def __init__(self, client: CoreClient | RemoteCore | CoreGroup, streams: RequestStreams) -> None:
        self._client, self._streams = client, streams

    @property
    def folders(self) -> list[str]:
        """Of each core's sockets, for `AsyncLLM.for_shared_core` in other processes; once the engine is started."""
        return self._client.folders

    def healths(self) -> list[Health]:
        """The state of each core."""
        return self._client.healths()

    async def stats(self, seconds: float | None = None) -> list[CoreStats | None]:
        """Of each core; None for one that is gone, or takes longer to answer."""
        return await self._client.engine_stats(seconds)

    async def restart(self, engine: int) -> None:
        """Put another core in the place of one; requests of the old core that still run fail. Raises what the
        start raises."""
        assert isinstance(self._client, CoreGroup)
        await self._client.restart(engine)

    def lose(self, engine: int, cause: DeathCause) -> None:
        """One does not answer any more, as another process knows; its requests fail."""
        assert isinstance(self._client, CoreGroup)
        self._client.lose(engine, cause)

    def fail_requests(self, error: Exception, engine: int) -> int:
        """End the streams of one that does not answer; how many. It is asked to abort them."""
        assert isinstance(self._client, CoreGroup)
        return self._streams.fail(error, self._client.requests_of(engine))
