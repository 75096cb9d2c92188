"""RemoteCore: an engine core in a process that another front starts, watches and ends."""

from __future__ import annotations

from graphllm.engine.process.core_client import Health
from graphllm.engine.process.core_link import CoreLink
from graphllm.engine.process.messages import DeathCause, EngineDeadError, Ready


class RemoteCore(CoreLink):
    """What `CoreClient` is to the front that has started the core. That one knows how the core does; here it is ready
    until somebody says `end`.

    name: no other front of the core has it.
    folder: of its sockets, "" for one that is gone.
    loads: as for `CoreLink`.
    """

    def __init__(self, name: str, folder: str, loads: bool = False) -> None:
        super().__init__(name, loads)
        self.folder, self.folders = folder, [folder]
        if not folder:
            self.end(DeathCause(kind="exit", message="it is not there"))

    async def start(self) -> Ready:
        """Connect. Raises EngineDeadError when it is ended before."""
        if self._cause is not None:
            raise EngineDeadError(self._cause)
        return await self.connect(self.folder)

    def health(self) -> Health:
        """As far as it is known here."""
        if self._cause is not None:
            return Health("dead", 0.0, self._cause)
        return Health("starting" if self.ready is None else "ready")

    def healths(self) -> list[Health]:
        """Of each core."""
        return [self.health()]

    async def close(self, drain_timeout: float = 0.0) -> None:
        """Leave the core; it goes on for others."""
        self.kill()

    async def destroy(self) -> None:
        """As `kill`."""
        self.kill()

    def kill(self, grace: float | None = None) -> None:
        """As `close`; all that wait here get the cause."""
        self.end(DeathCause(kind="closed", message="the engine was shut down"))
        self.disconnect()
