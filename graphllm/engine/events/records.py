"""What happened to the cache, as the step hands it to the publisher's thread: little work to make, none to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from graphllm.engine.requests.request import EngineRequest


class Stored(NamedTuple):
    """Consecutive blocks of a sequence that can be found now.

    group: number of the cache group; the snapshots of recurrent states count as one more.
    digests: of the blocks.
    medium: where they lie.
    parent: digest of the block before; None at the beginning.
    start: position of the first token.
    tokens: of the blocks; empty where nobody knows them.
    request: whose tokens they are; None where nobody knows.
    """

    group: int
    digests: list[bytes]
    medium: str
    parent: bytes | None = None
    start: int = 0
    tokens: Sequence[int] = ()
    request: EngineRequest | None = None


class Removed(NamedTuple):
    """Blocks of a cache group that can be found no more at that medium."""

    group: int
    digests: list[bytes]
    medium: str


class Cleared(NamedTuple):
    """Nothing can be found any more."""


Record = Stored | Removed | Cleared


class Batch(NamedTuple):
    """The records of a step. number: counts batches, dropped ones too. time: seconds since 1970."""

    number: int
    time: float
    records: list[Record]
