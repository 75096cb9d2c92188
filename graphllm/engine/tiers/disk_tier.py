"""DiskTier: the core's side of files on disk. It knows which keys all ranks have a file of; ranks read and write them
(`graphllm.runtime.commands.files`)."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from graphllm.config import ConfigError
from graphllm.config.setting import size_text
from graphllm.engine.cache.block_pool import Key
from graphllm.engine.requests.request import TierStats
from graphllm.engine.tiers.further_tier import Entries, Fetched
from graphllm.engine.tiers.tier_pool import BLOCKS, SNAPSHOTS, kind_of
from graphllm.engine.tiers.wanted import SNAPSHOT
from graphllm.runtime.commands.command import Answered, Command, Query
from graphllm.runtime.commands.files import (
    AskFiles,
    ClearFiles,
    CloseFiles,
    FileNews,
    OpenFiles,
    ReadFiles,
    WriteFiles,
)
from graphllm.runtime.tiers.files.file_format import file_bytes

_log = logging.getLogger(__name__)
_LATER = 0.5  # seconds between two looks at what other processes have done, where nothing runs
_SOON = 0.02  # seconds between two looks while files are written, and while those of earlier processes are not known
_PATIENCE = 30.0  # seconds after which a file that is still being read says that the disk hangs
_AGAIN = 8  # part of the files that are new when another use of the others counts
_TOGETHER = 32  # files of a job that is told as a whole


class Ranks(Protocol):
    """The part of an executor that the tier uses."""

    def do(self, command: Command) -> None: ...

    def ask(self, query: Query) -> list[Answered]: ...


class _Job(NamedTuple):
    """keys: of its entries. begun: when. writes: whether files are written."""

    keys: Sequence[Key]
    begun: float
    writes: bool


class DiskTier:
    """A `FurtherTier`.

    folder: of this model's files.
    max_bytes: of all files; None: half of the free space.
    rank_bytes: of an entry on each rank, by kind.
    host_entries: of host memory, by kind; half of them may wait to be written.
    """

    name = "disk"
    writes = True

    def __init__(
        self, ranks: Ranks, folder: str, max_bytes: int | None, rank_bytes: Mapping[str, Sequence[int]],
        host_entries: Mapping[str, int], clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._ranks, self._clock = ranks, clock
        self._room = {kind: max(1, entries // 2) for kind, entries in host_entries.items()}
        self._there = [set[Key]() for _ in rank_bytes[BLOCKS if BLOCKS in rank_bytes else SNAPSHOTS]]
        self._tickets = itertools.count(1)
        self._jobs = dict[int, _Job]()
        self._answers = dict[int, list[list[bool]]]()  # by ticket: of each rank on which the job has ended
        self._writing = {kind: set[Key]() for kind in host_entries}
        self._used = {kind: list[bytes]() for kind in host_entries}
        self._used_lately, self._num_new = set[Key](), 0
        self._fetched, self._written = list[Fetched](), list[Key]()
        self._asked, self._scanned, self._hangs = float("-inf"), False, False
        self._stats = TierStats()
        files = {kind: [file_bytes(size) for size in sizes] for kind, sizes in rank_bytes.items()}
        whole = sum(host_entries[kind] * sum(sizes) for kind, sizes in files.items())
        shares = {kind: [host_entries[kind] * size / whole for size in sizes] for kind, sizes in files.items()}
        least = max(files[kind][0] / of[0] for kind, of in shares.items())
        if max_bytes is not None and max_bytes < least:
            raise ConfigError(
                f"kv_offloading_disk_size is {max_bytes}: the smallest number of files takes {size_text(int(least))}; "
                "give more, such as 10GiB, or leave it out"
            )
        ranks.do(OpenFiles(folder, max_bytes, shares, self._room))

    @property
    def busy(self) -> bool:
        return any(not job.writes for job in self._jobs.values())

    def has(self, key: Key) -> bool:
        return not self._hangs and all(key in there for there in self._there)

    def fetch(self, entries: Entries) -> None:
        for kind, of in _by_kind(entries).items():
            self._begin(kind, of, writes=False)

    def fetched(self) -> Sequence[Fetched]:
        self._look()
        found, self._fetched = self._fetched, []
        return found

    def offer(self, entries: Entries) -> Sequence[Key]:
        begun = list[Key]()
        for kind, of in _by_kind(entries).items():
            writing, new = self._writing[kind], list[tuple[Key, int]]()
            for key, entry in of:
                if self.has(key):
                    self._used[kind].append(_file_key(key))
                elif key not in writing and len(writing) < self._room[kind]:  # what finds no room stays in host memory
                    writing.add(key)
                    new.append((key, entry))
            for part in _batches(new):
                self._begin(kind, part, writes=True)
            begun += [key for key, _ in new]
        return begun

    def written(self) -> Sequence[Key]:
        found, self._written = self._written, []
        return found

    def use(self, keys: Iterable[Key]) -> None:
        if self._num_new * _AGAIN >= sum(map(len, self._there)):
            self._used_lately.clear()
            self._num_new = 0
        for key in keys:
            if key not in self._used_lately and self.has(key):
                self._used_lately.add(key)
                self._used[kind_of(key)].append(_file_key(key))

    def reset(self) -> None:
        for there in self._there:
            there.clear()
        for used in self._used.values():
            used.clear()
        self._used_lately.clear()
        self._ranks.do(ClearFiles())

    def stats(self) -> TierStats:
        return msgspec.structs.replace(self._stats)

    def close(self) -> None:
        self._ranks.do(CloseFiles())

    def _begin(self, kind: str, entries: Entries, writes: bool) -> None:
        ticket = next(self._tickets)
        self._jobs[ticket] = _Job([key for key, _ in entries], self._clock(), writes)
        command = WriteFiles if writes else ReadFiles
        self._ranks.do(command(kind, [(_file_key(key), entry) for key, entry in entries], ticket))

    def _look(self) -> None:
        """Ask the ranks while a request waits, and else at times: it is a round trip to all of them."""
        now = self._clock()
        if not self.busy and now < self._asked + (_SOON if self._jobs or not self._scanned else _LATER):
            return
        self._asked = now
        used = {kind: keys for kind, keys in self._used.items() if keys}
        self._used = {kind: [] for kind in self._used}
        stats, scanned = TierStats(), True
        for there, answer in zip(self._there, self._ranks.ask(AskFiles(used)), strict=True):
            news = msgspec.convert(answer.value, FileNews)
            there.update(map(_key, news.added))
            self._num_new += len(news.added)
            there.difference_update(map(_key, news.removed))
            for ticket, succeeded in news.ended.items():
                self._answers.setdefault(ticket, []).append(succeeded)
            scanned = scanned and news.scanned
            stats.used_bytes += news.used_bytes
            stats.total_bytes += news.total_bytes
            stats.stored_bytes += news.stored_bytes
            stats.damaged_files += news.damaged
            stats.dropped_files += news.dropped
            stats.failed_files += news.failed
        self._scanned, self._stats = scanned, stats
        for ticket in [t for t, answers in self._answers.items() if len(answers) == len(self._there)]:
            self._end(self._jobs.pop(ticket), self._answers.pop(ticket), now)
        hangs = any(not job.writes and now > job.begun + _PATIENCE for job in self._jobs.values())
        if hangs and not self._hangs:
            _log.warning(
                "kv_offloading_disk: a file is being read for more than %.0f s; blocks are computed until it is there; "
                "look at the disk", _PATIENCE,
            )  # fmt: skip
        self._hangs = hangs

    def _end(self, job: _Job, answers: list[list[bool]], now: float) -> None:
        """A job has ended on all ranks."""
        if job.writes:
            for key in job.keys:
                self._writing[kind_of(key)].discard(key)
            self._written += job.keys
        else:
            filled = dict(zip(job.keys, map(all, zip(*answers, strict=True)), strict=True))
            self._fetched.append(Fetched(filled, now - job.begun))


def _by_kind(entries: Entries) -> dict[str, list[tuple[Key, int]]]:
    found: dict[str, list[tuple[Key, int]]] = {}
    for key, entry in entries:
        found.setdefault(kind_of(key), []).append((key, entry))
    return found


def _batches(entries: Entries) -> Iterable[Entries]:
    return [entries[at : at + _TOGETHER] for at in range(0, len(entries), _TOGETHER)]


def _file_key(key: Key) -> bytes:
    """The digest first: its beginning chooses the folder."""
    group, digest = key
    return digest + (group - SNAPSHOT).to_bytes(2, "big")


def _key(file_key: bytes) -> Key:
    return int.from_bytes(file_key[-2:], "big") + SNAPSHOT, file_key[:-2]
