"""Simulated files of two ranks under the tier on disk. What may be late is late: memory is read and filled only when a
job ends. Writes and reads fail at times, and files go, on one rank or on both."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from graphllm.engine.tiers.disk_tier import DiskTier
from graphllm.engine.tiers.further_tier import FurtherTier
from graphllm.runtime.commands.command import Answered, Command, Query
from graphllm.runtime.commands.files import AskFiles, ClearFiles, FileNews, OpenFiles, ReadFiles, WriteFiles

if TYPE_CHECKING:
    from tests.engine.simulation import Simulation


class SimulatedFiles:
    """One rank's. moves: whether it reads and fills the simulated host memory, which the other rank does, too."""

    def __init__(self, sim: Simulation, random: random.Random, moves: bool) -> None:
        self._sim, self._random, self._moves = sim, random, moves
        self.contents: dict[bytes, Any] = {}
        self._jobs = deque[WriteFiles | ReadFiles]()
        self._ended: dict[int, list[bool]] = {}
        self._news: dict[bytes, bool] = {}

    def do(self, command: Command) -> None:
        match command:
            case WriteFiles() | ReadFiles():
                self._jobs.append(command)
            case ClearFiles():
                self._news.update(dict.fromkeys(self.contents, False))
                self.contents.clear()
            case OpenFiles():
                pass
            case _:
                raise AssertionError(command)

    def news(self, query: AskFiles) -> FileNews:
        """Some time has passed."""
        for _ in range(self._random.randrange(3)):
            if self._jobs:
                job = self._jobs.popleft()
                act = self._write if isinstance(job, WriteFiles) else self._read
                self._ended[job.ticket] = [act(key, job.kind, entry) for key, entry in job.entries]
        if self.contents and self._random.random() < 0.1:
            self._forget(self._random.choice(list(self.contents)))
        ended, self._ended, news, self._news = self._ended, {}, self._news, {}
        there = [[key for key, is_there in news.items() if is_there == wanted] for wanted in (True, False)]
        return FileNews(ended, *there, True, 0, 0, 0)

    def _host(self, kind: str) -> dict[int, Any]:
        return self._sim.rank.host[kind]

    def _write(self, key: bytes, kind: str, entry: int) -> bool:
        if self._random.random() < 0.1:
            return False
        self.contents[key] = self._host(kind)[entry] if self._moves else None
        self._news[key] = True
        return True

    def _read(self, key: bytes, kind: str, entry: int) -> bool:
        if key not in self.contents or self._random.random() < 0.1:
            self._host(kind)[entry] = "garbage"
            self._forget(key)
            return False
        if self._moves:
            self._host(kind)[entry] = self.contents[key]
        return True

    def _forget(self, key: bytes) -> None:
        if key in self.contents:
            del self.contents[key]
            self._news[key] = False


class _Both:
    """An executor of two ranks."""

    def __init__(self, ranks: list[SimulatedFiles]) -> None:
        self._ranks = ranks

    def do(self, command: Command) -> None:
        for rank in self._ranks:
            rank.do(command)

    def ask(self, query: Query) -> list[Answered]:
        assert isinstance(query, AskFiles)
        return [Answered(msgspec.to_builtins(rank.news(query), builtin_types=(bytes,))) for rank in self._ranks]


def simulated_disk(sim: Simulation, random: random.Random) -> FurtherTier:
    """The tier on disk over simulated files. Time goes on with each look."""
    ranks = _Both([SimulatedFiles(sim, random, moves) for moves in (True, False)])
    kinds = ["blocks"] if sim.scheduler.cache.groups else []
    if sim.scheduler.cache.states.pools:
        kinds.append("snapshots")
    seconds = iter(range(10**9))
    sizes = {kind: [1, 1] for kind in kinds}
    return DiskTier(ranks, "/folder", None, sizes, dict.fromkeys(kinds, 20), lambda: float(next(seconds)))
