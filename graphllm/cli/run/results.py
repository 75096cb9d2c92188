"""The results that `graphllm run` writes: a file that is continued when the same command runs again."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from graphllm.cli.endings import CommandError
from graphllm.config import ConfigError

_SYNC_SECONDS = 10.0
_State = Literal["answered", "refused", "failed"]
_BEGIN = b'{"id":'  # of every line


class JsonlSink:
    """A file of results: one line for each item of the input, with the item's digest.

    wanted: id and digest of every item. A file of an earlier run is continued:
    - The result of an item that is still there is kept, also under another id or in another place. The places of these
      items are ``finished``.
    - A half-written last line is cut off.
    - Results with a failure of the engine are taken out, and their items run again.
    - Results of items that are gone move to the file ``moved_to``.

    Lines come in the order of the items; a file with lines in another order gets this order once all are done. A file
    that is not regular, such as a pipe, is written from its beginning.

    Raises ConfigError for what cannot be continued, and CommandError where nothing more can be written.
    """

    def __init__(self, path: Path, wanted: Sequence[tuple[str, str]], source: str | None = None) -> None:
        self.path, self.finished, self.refused, self.moved = path, set[int](), 0, 0
        self._wanted, self._held = wanted, dict[int, bytes]()
        self._lines: list[int] = []  # the place of every line that the file has
        self._next, self._synced = 0, time.monotonic()
        try:
            self._regular = path.is_file() or not path.exists()
            if _same_file(path, source):
                raise ConfigError(f"output: {path} is the input file; give another one")
            self._file = _locked(path) if self._regular else path.open("wb")
            if self._regular:
                self._continue(_results_in(self._file, path))
        except OSError as reason:
            raise ConfigError(f"output: cannot write {path}: {reason.strerror or reason}") from reason
        self._left = [place for place in range(len(wanted)) if place not in self.finished]

    @property
    def moved_to(self) -> Path:
        """The file for results of items that are gone."""
        return self.path.with_name(self.path.name + ".old")

    def _continue(self, found: Sequence[_Found]) -> None:
        """Keep what belongs to an item."""
        path, unused = self.path, {(f.id, f.digest): n for n, f in enumerate(found) if f.state != "failed"}
        kept = {}
        for place, key in enumerate(self._wanted):
            if (line := unused.pop(key, None)) is not None:
                kept[line] = place
        same: dict[str | None, list[int]] = {}
        for (_, digest), line in unused.items():
            same.setdefault(digest, []).append(line)
        taken = set(kept.values())
        for place, (_, digest) in enumerate(self._wanted):
            if place not in taken and same.get(digest):
                kept[same[digest].pop(0)] = place
        gone = {n for n, f in enumerate(found) if n not in kept and f.state != "failed"}
        if gone and not kept:
            why = "the input, the sampling parameters, the model or its settings have changed"
            if all(found[n].digest is None for n in gone):
                why = "it was written by an older version, which did not note what its results belong to"
            raise ConfigError(
                f"output: {path} holds {len(gone)} results and none of this run: {why}; give another file, move this "
                "one away to run all again, or repeat the command that wrote it"
            )
        self.finished = set(kept.values())
        self.refused = sum(found[n].state == "refused" for n in kept)
        self.moved = len(gone)
        if gone:
            with self.moved_to.open("ab") as moved:
                moved.writelines(line for n, line in enumerate(_whole_lines(self._file)) if n in gone)
                _sync(moved)
        self._file.truncate(sum(f.size for f in found))
        self._lines = [kept[n] for n in sorted(kept)]
        renamed = any(found[n].id != self._wanted[place][0] for n, place in kept.items())
        if len(kept) < len(found) or renamed:
            self._rewrite([kept.get(n) for n in range(len(found))])
        self._order()

    def _rewrite(self, places: Sequence[int | None]) -> None:
        """Replace the file, at once, by one of its lines in the order of these places, under their items' ids. None
        for a line: without it."""
        path = self.path.resolve()
        part = path.with_name(path.name + ".part")
        starts = list(itertools.accumulate((len(line) for line in _whole_lines(self._file)), initial=0))
        try:
            with part.open("wb") as out:
                for place, start in sorted((p, at) for p, at in zip(places, starts, strict=False) if p is not None):
                    self._file.seek(start)
                    row = json.loads(self._file.readline())
                    name = "custom_id" if "custom_id" in row else "id"
                    out.write(_line(row | {name: self._wanted[place][0]}))
                _sync(out)
            replaced = _locked(part)
            os.replace(part, path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        self._file.close()
        self._file = replaced
        self._file.seek(0, os.SEEK_END)
        self._lines = sorted(p for p in places if p is not None)

    def _order(self) -> None:
        if len(self._lines) == len(self._wanted) and self._lines != sorted(self._lines) and self._regular:
            self._rewrite(self._lines)

    def put(self, number: int, row: Mapping[str, Any]) -> None:
        """Take the row of an item, by its number among the items that were not finished before. Rows are written in the
        order of the items."""
        self._held[number] = _line({"id": row["id"], "digest": self._wanted[self._left[number]][1], **row})
        with self._failures_told():
            while self._next in self._held:
                self._write(self._next)
                self._next += 1
            if time.monotonic() - self._synced > _SYNC_SECONDS:
                self._sync()

    def close(self) -> None:
        """Write what still waits for others, and make sure that everything is on disk."""
        with self._failures_told():
            for number in sorted(self._held):
                self._write(number)
            self._sync()
            self._order()
            self._file.close()

    @property
    def done(self) -> int:
        """Results that are written."""
        return len(self._lines)

    @contextlib.contextmanager
    def _failures_told(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as reason:
            raise CommandError(
                f"cannot write {self.path}: {reason.strerror}; {self.done} of {len(self._wanted)} requests are done: "
                "make room and run the same command again to go on",
                1,
            ) from reason

    def _write(self, number: int) -> None:
        """Write a line whole, or nothing of it, so that others may follow."""
        fd, line = self._file.fileno(), memoryview(self._held[number])
        size = os.fstat(fd).st_size
        try:
            while line:
                line = line[os.write(fd, line) :]
        except BaseException:
            if self._regular:
                os.ftruncate(fd, size)
            raise
        del self._held[number]
        self._lines.append(self._left[number])

    def _sync(self) -> None:
        if self._regular:
            os.fsync(self._file.fileno())
        self._synced = time.monotonic()


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _same_file(path: Path, source: str | None) -> bool:
    """Whether what is read, "-" for stdin, is the regular file ``path``, under whatever name."""
    if source is None or not path.is_file():
        return False
    return os.path.samestat(path.stat(), os.fstat(0) if source == "-" else os.stat(source))


def _locked(path: Path) -> IO[bytes]:
    """The file, to read from its beginning and to append to, locked for this process."""
    file = path.open("a+b")
    file.seek(0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as taken:
        raise ConfigError(f"output: another run is writing {path}; wait for it, or give another file") from taken
    return file


class _Found(NamedTuple):
    """A line of an earlier run. digest: None in a file of an older version. size: in bytes."""

    id: str
    digest: str | None
    state: _State
    size: int


def _whole_lines(file: IO[bytes]) -> Iterator[bytes]:
    file.seek(0)
    return (line for line in file if line.endswith(b"\n"))


def _results_in(file: IO[bytes], path: Path) -> list[_Found]:
    """The whole lines. Raises ConfigError for a file of something else, which must not be changed."""
    strange = ConfigError(f"output: {path} has a line that is no result; move the file away, or give another one")
    if not _BEGIN.startswith(file.read(len(_BEGIN))):
        raise strange
    found = []
    try:
        for line in _whole_lines(file):
            found.append(_read_row(json.loads(line), len(line)))
    except (ValueError, TypeError, LookupError, AttributeError) as damage:
        raise strange from damage
    file.seek(sum(f.size for f in found))
    half = file.read()
    try:
        other = "digest" not in json.loads(half)
    except ValueError:
        other = False
    if other or not half.startswith(_BEGIN[: len(half)]):
        raise strange
    return found


def _read_row(row: Any, size: int) -> _Found:
    """A result. Its state tells a failure of the engine from a request that could not run."""
    digest = row.get("digest")
    if "custom_id" in row:
        status = 500 if row["response"] is None else row["response"]["status_code"]
        state: _State = "failed" if status >= 500 else "answered" if status < 400 else "refused"
        return _Found(str(row["custom_id"]), digest, state, size)
    choices: Iterable[dict[str, Any]] = row.get("choices", [row])
    failed = any(choice.get("finish_reason") == "error" for choice in choices)
    state = "failed" if failed else "refused" if "error" in row else "answered"
    return _Found(str(row["id"]), digest, state, size)
