"""RemoteReads: copies by a library that reads the memory of another engine's rank over a network."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from graphllm.runtime.tiers.host_memory import HostMemory
from graphllm.runtime.tiers.peer_copies import Pairs, PeerCopies


class Region(NamedTuple):
    """A piece of this process's memory.

    address: of its first byte.
    nbytes: its size.
    """

    address: int
    nbytes: int


class Read(NamedTuple):
    """One copy: ``nbytes`` bytes from the peer's address ``remote`` to this process's address ``local``."""

    local: int
    remote: int
    nbytes: int


class Endpoint(Protocol):
    """One end of a library's connections, with the regions that it may read and write."""

    @property
    def name(self) -> Any:
        """What the endpoint of another engine must know to read the regions of this one, as plain data."""

    def read(self, peer: Any, reads: Sequence[Read]) -> None:
        """Copy, and wait for it. peer: the name of another endpoint. Raises OSError, after which only `close` is
        called."""

    def close(self) -> None:
        """End all connections. When this returns, nothing is written into the regions any more."""


class RemoteReads(PeerCopies):
    """Two endpoints have this rank's memory: other engines read by the first one, this engine reads by the second one.

    The second one is closed when a read fails, because the library may still write late. The next read opens another.
    """

    def __init__(self, memory: HostMemory, rank: int, num_ranks: int, config: Mapping[str, Any]) -> None:
        self._regions = {
            kind: Region(pieces.ctypes.data, pieces.nbytes)
            for kind in memory.kinds
            if (pieces := memory.pieces(kind)).nbytes
        }
        self._giver = self.open(list(self._regions.values()), config)
        self._taker: Endpoint | None = None
        super().__init__(memory, rank, num_ranks, config)

    @abstractmethod
    def open(self, regions: Sequence[Region], config: Mapping[str, Any]) -> Endpoint:
        """An endpoint of the library. Raises ConfigError where the settings do not let it."""

    def get_handshake_metadata(self) -> dict[str, Any]:
        """name: of the endpoint. addresses: of the memory of each kind."""
        addresses = {kind: region.address for kind, region in self._regions.items()}
        return {**super().get_handshake_metadata(), "name": self._giver.name, "addresses": addresses}

    def read(self, peer: Mapping[str, Any], pairs: Mapping[str, Pairs]) -> None:
        reads = list[Read]()
        for kind, of in pairs.items():
            size, here, there = self.memory.entry_bytes(kind), self._regions[kind].address, peer["addresses"][kind]
            reads += [Read(here + to * size, there + at * size, size) for to, at in of]
        if self._taker is None:
            self._taker = self.open(list(self._regions.values()), self.config)
        try:
            self._taker.read(peer["name"], reads)
            return
        except Exception as failure:  # whatever class of error a library has
            why = str(failure)
        self._taker.close()
        self._taker = None
        raise ConnectionError(why)

    def shutdown(self) -> None:
        super().shutdown()
        if self._taker is not None:
            self._taker.close()
        self._giver.close()
