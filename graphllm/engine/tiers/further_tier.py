"""FurtherTier: where contents lie beyond host memory: a disk, another engine. Whatever comes or goes passes host
memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from graphllm.engine.cache.block_pool import Key
from graphllm.engine.requests.request import TierStats

Entries = Sequence[tuple[Key, int]]  # keys, and their entries of host memory


class Fetched(NamedTuple):
    """Ends of fetches.

    keys: whether each entry was filled.
    seconds: that they took.
    """

    keys: Mapping[Key, bool]
    seconds: float


class FurtherTier(Protocol):
    """All methods run in the core's thread and return at once.

    name: of the tier, for metrics.
    writes: what the device's cache stores is offered at once, not only when it is about to be evicted.
    busy: fetches run. Writes go on also when nobody asks for them.
    """

    name: str
    writes: bool

    @property
    def busy(self) -> bool: ...

    def has(self, key: Key) -> bool:
        """Whether it has this key's contents, as far as is known now."""
        ...

    def fetch(self, entries: Entries) -> None:
        """Begin to fill entries of host memory, on every rank; `fetched` says when."""

    def fetched(self) -> Sequence[Fetched]:
        """The fetches that have ended since this was last asked."""
        ...

    def offer(self, entries: Entries) -> Sequence[Key]:
        """Host memory has these contents now, on every rank. The keys that it begins to write: their entries stay until
        `written`."""
        ...

    def written(self) -> Sequence[Key]:
        """The keys that it has written, or could not write, since this was last asked."""
        ...

    def use(self, keys: Iterable[Key]) -> None:
        """A request uses these contents, wherever it has them from: what the tier has of them should stay. keys: in the
        order of the sequence."""

    def reset(self) -> None:
        """Forget all contents: the model has changed."""

    def stats(self) -> TierStats:
        """As of now; what has come from it is counted elsewhere."""
        ...

    def close(self) -> None:
        """Finish what is being written."""
