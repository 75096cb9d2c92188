"""All ranks of an engine but 0, wherever they are, as rank 0's executor sees them."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Sequence
from typing import Protocol, TypeVar

import msgspec

from graphllm.runtime.ranks.rank_failure import RankError, SharedFate
from graphllm.runtime.ranks.rank_messages import Message, Report, Stop

_T = TypeVar("_T")


class RanksOfHost(Protocol):
    """The ranks of one host: `RankProcesses` on this one, `RemoteRanks` on another. numbers: their numbers."""

    numbers: range

    def write(self, command: bytes) -> None:
        """Have all of them do something, as encoded; returns at once. Raises RankError."""

    def word(self, rank: int, at: int) -> int:
        """A word that one of them has written."""

    def stop(self, command: bytes) -> None:
        """Send the command to stop; ends are in order from now on."""

    def close(self) -> None:
        """End them. May be called again."""


class AllRanks:
    """degree: how many ranks there are, with 0.
    fate: what ends all of them.
    hosts: see `begin`.
    undo: what ends with the ranks, after them.
    """

    def __init__(self, degree: int, fate: SharedFate) -> None:
        self.degree, self.fate = degree, fate
        self.hosts: Sequence[RanksOfHost] = ()
        self.undo = contextlib.ExitStack()
        self._encode = msgspec.msgpack.Encoder().encode
        self._reports: list[queue.SimpleQueue[Report | None]] = [queue.SimpleQueue() for _ in range(1, degree)]
        self._host_of: dict[int, RanksOfHost] = {}
        fate.ends(self._wake)

    def begin(self, hosts: Sequence[RanksOfHost]) -> None:
        """These hosts have all ranks."""
        self.hosts = hosts
        self._host_of = {rank: host for host in hosts for rank in host.numbers}

    def hear(self, rank: int, report: Report) -> None:
        """Take in what a rank reports, in any thread."""
        self._reports[rank - 1].put(report)

    def send(self, message: Message) -> None:
        """Have all ranks do something; returns at once. Raises RankError."""
        data = self._encode(message)
        for host in self.hosts:
            host.write(data)

    def answers(self, kind: type[_T], timeout: float | None = None) -> list[_T]:
        """The next report of every rank, in their order. timeout: seconds after which one without counts as gone.
        Raises as `SharedFate.check` does."""
        found = []
        until = None if timeout is None else time.monotonic() + timeout
        for rank, reports in enumerate(self._reports, 1):
            try:
                report = reports.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
            except queue.Empty:
                self.fate.fail(RankError(f"rank {rank} of {self.degree} has not answered within {timeout:g} s"))
                self.fate.check()
            if report is None:
                self.fate.check_soon()
            assert isinstance(report, kind), f"rank {rank} said {report}"
            found.append(report)
        return found

    def word(self, rank: int, at: int) -> int:
        """A word that a rank has written for rank 0."""
        return self._host_of[rank].word(rank, at)

    def stop(self) -> None:
        """The ranks finish their commands and end; `close` waits for that."""
        data = self._encode(Stop())
        for host in self.hosts:
            host.stop(data)

    def close(self) -> None:
        """End the ranks, in good order after `stop`. May be called again."""
        self.fate.settle()
        for host in self.hosts:
            host.close()
        self.undo.close()

    def _wake(self) -> None:
        for reports in self._reports:
            reports.put(None)
