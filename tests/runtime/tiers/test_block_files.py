"""BlockFiles: what was written is read, by this process and by later ones; the least recently used files go."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from graphllm.runtime.tiers.files.disk import Disk, pages
from graphllm.runtime.tiers.files.file_format import PAGE, file_bytes, path_of
from tests.runtime.tiers.stores import (
    ENTRY,
    SlowDisk,
    content,
    ended,
    files_in,
    key,
    opened,
    read,
    until,
    write,
)
from tests.tiers import draws

_NUMBERS = st.integers(0, 9)


class StoreMachine(RuleBasedStateMachine):
    """The model: a dict with what lies on disk, the least recently used first."""

    @initialize(limit=st.integers(1, 5), aligned=st.booleans())
    def start(self, limit: int, aligned: bool) -> None:
        self.place, self.limit = TemporaryDirectory(), limit
        self.size = 2 * PAGE if aligned else ENTRY
        self.folder = Path(self.place.name) / "store"
        self.model = OrderedDict[int, None]()
        self.store = opened(self.folder, limit, self.size)
        self.known = set[bytes]()

    @rule(number=_NUMBERS)
    def write(self, number: int) -> None:
        expected = "present" if number in self.model else "written"
        assert write(self.store, number, self.size) == expected
        self.model[number] = None
        self.model.move_to_end(number)
        while len(self.model) > self.limit:
            self.model.popitem(last=False)

    @rule(number=_NUMBERS)
    def read(self, number: int) -> None:
        assert read(self.store, number, self.size) == ("read" if number in self.model else "missing")
        if number in self.model:
            self.model.move_to_end(number)

    @rule(numbers=st.lists(_NUMBERS))
    def use(self, numbers: list[int]) -> None:
        self.store.use([key(number) for number in numbers])
        for number in numbers:
            if number in self.model:
                self.model.move_to_end(number)

    @rule(number=_NUMBERS)
    def delete_from_outside(self, number: int) -> None:
        """It is noticed when it is read."""
        if number in self.model:
            (self.folder / path_of(key(number))).unlink()
            assert read(self.store, number, self.size) == "missing"
            del self.model[number]

    @rule(number=_NUMBERS, at=st.integers(PAGE, 2 * PAGE - 1))
    def damage(self, number: int, at: int) -> None:
        if number in self.model:
            flip(self.folder / path_of(key(number)), at)
            assert read(self.store, number, self.size) == "damaged"
            del self.model[number]

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.model.clear()
        until(lambda: not files_in(self.folder))

    @rule()
    def restart(self) -> None:
        self._check_news()
        self.store.close()
        self.store, self.known = opened(self.folder, self.limit, self.size), set()

    def _check_news(self) -> None:
        while self.store.has_news:
            added, removed = self.store.take_news(2)
            assert len(added) + len(removed) <= 2
            self.known = self.known.difference(removed).union(added)
        assert self.known == {key(number) for number in self.model}

    @invariant()
    def same(self) -> None:
        if hasattr(self, "store"):
            self._check_news()
            assert {number for number in range(10) if key(number) in self.store} == self.model.keys()
            assert files_in(self.folder) == sorted(self.folder / path_of(key(number)) for number in self.model)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.place.cleanup()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=draws(10, 200), stateful_step_count=30, deadline=None)


def flip(file: Path, at: int) -> None:
    """Change one bit of a file."""
    with file.open("r+b") as opened_file:
        opened_file.seek(at)
        byte = opened_file.read(1)
        opened_file.seek(at)
        opened_file.write(bytes([byte[0] ^ 4]))


def test_a_file_is_the_owners_alone(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    write(store, 1)
    store.close()
    (file,) = files_in(tmp_path / "store")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in [tmp_path / "store", *file.parents[:2]]} == {0o700}
    assert file.stat().st_size == file_bytes(ENTRY) == PAGE + 2 * PAGE


def test_ordinary_files_where_the_page_cache_cannot_be_passed_by(tmp_path: Path) -> None:
    class Ordinary(Disk):
        def prepare(self) -> None:
            super().prepare()
            self.direct = False

    store = opened(tmp_path, disk=Ordinary(tmp_path))
    assert (write(store, 1), read(store, 1)) == ("written", "read")
    store.close()
    store = opened(tmp_path)
    assert read(store, 1) == "read"
    store.close()


def test_writes_never_wait(tmp_path: Path) -> None:
    """With a disk that stands still, as many writes wait as may; the others are dropped, and reads go on."""
    disk = SlowDisk(tmp_path)
    store = opened(tmp_path, disk=disk, max_writes=3, writers=1)
    disk.let.release()
    assert write(store, 0) == "written"
    jobs = [store.write(key(1), content(1))]
    until(lambda: not store._writes)  # a thread has taken it
    jobs += [store.write(key(number), content(number)) for number in range(2, 8)]
    assert [job.outcome for job in jobs] == [None] * 4 + ["dropped"] * 3
    assert store.write(key(2), content(2)) is jobs[1]
    assert read(store, 0) == "read"
    disk.let.release(4)
    assert [ended(job) for job in jobs] == ["written"] * 4 + ["dropped"] * 3
    assert store.stats().dropped == 3
    store.close()


def test_closing_drops_what_a_slow_disk_does_not_take(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path)
    store = opened(tmp_path, disk=disk, writers=1)
    jobs = [store.write(key(number), content(number)) for number in range(3)]
    store.close(seconds=0.05)
    assert [job.outcome for job in jobs[1:]] == ["dropped"] * 2
    assert store.write(key(9), content(9)).outcome == "dropped"
    assert store.read(key(9), content(9)).outcome == "failed"
    disk.let.release(3)
    assert ended(jobs[0]) == "written"


def test_what_was_cleared_while_it_was_written_is_gone(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path)
    store = opened(tmp_path, disk=disk, writers=2)
    jobs = [store.write(key(number), content(number)) for number in range(4)]
    store.clear()
    disk.let.release(4)
    assert [ended(job) for job in jobs] == ["dropped"] * 4
    disk.let.release(4)
    assert write(store, 7) == "written"
    assert [read(store, number) for number in (0, 7)] == ["missing", "read"]
    until(lambda: len(files_in(tmp_path)) == 1)
    store.close()


def test_a_file_that_waits_to_be_deleted_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    """The same key may have other contents after `clear`, such as with other weights."""

    class Deleting(Disk):
        def scan(self) -> Iterator[tuple[Path, int, int]]:
            found = list(super().scan())
            if found:
                scanned.release()
                let.acquire()
            yield from found

    scanned, let = threading.Semaphore(0), threading.Semaphore(0)
    store = opened(tmp_path, disk=Deleting(tmp_path))
    assert write(store, 1) == "written"
    store.clear()
    scanned.acquire()
    assert read(store, 1) == "missing"
    assert ended(store.write(key(1), content(2))) == "written"
    let.release()
    until(lambda: not store._cleared)
    into = np.zeros(ENTRY, np.uint8)
    assert ended(store.read(key(1), into)) == "read"
    assert np.array_equal(into, content(2))
    store.close()


def test_the_default_limit_is_half_of_the_room(tmp_path: Path) -> None:
    """Also after a restart: its own files do not count as taken."""

    class Small(Disk):
        def free(self) -> int:
            return (12 - len(files_in(tmp_path))) * file_bytes(ENTRY)

    for _ in range(2):
        store = opened(tmp_path, None, disk=Small(tmp_path))
        for number in range(9):
            write(store, number)
        assert (store.stats().files, len(files_in(tmp_path))) == (6, 6)
        store.close()


def test_the_left_overs_of_a_dead_process_are_removed(tmp_path: Path) -> None:
    """But not what a living one is writing."""
    new, old = tmp_path / "new", time.time() - 3600
    store = opened(tmp_path)
    (new / "dead").write_bytes(b"half")
    disk = SlowDisk(tmp_path)
    seen = []

    class Looking(Disk):
        def _move(self, source: Path, place: Path) -> None:
            os.utime(source, (old, old))
            seen.append((disk.remove_survivors(), source.exists()))
            super()._move(source, place)

    os.utime(new / "dead", (old, old))
    (new / "young").write_bytes(b"half")
    Looking(tmp_path).write(path_of(key(1)), [pages(PAGE), pages(2 * PAGE)])
    assert seen == [(1, True)]
    assert [path.name for path in new.iterdir()] == ["young"]
    store.close()


_WRITER = """
import sys
from pathlib import Path
from tests.runtime.tiers.stores import opened, read, write
folder, start = Path(sys.argv[1]), int(sys.argv[2])
store = opened(folder)
print("ready", flush=True)
sys.stdin.readline()
assert {write(store, number) for number in range(start, start + 20)} <= {"written", "present"}
assert {read(store, number) for number in range(start, start + 20)} == {"read"}
store.close()
"""


def test_processes_share_a_folder(tmp_path: Path) -> None:
    """Two write the same blocks and others at once; a third finds all."""
    command = [sys.executable, "-c", _WRITER, str(tmp_path)]
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(
                subprocess.Popen([*command, str(start)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            for start in (0, 10)
        ]
        for process in running:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in running:
            process.communicate("go\n", timeout=60)
    assert [process.returncode for process in running] == [0, 0]
    store = opened(tmp_path)
    assert [read(store, number) for number in range(31)] == ["read"] * 30 + ["missing"]
    assert list((tmp_path / "new").iterdir()) == []
    store.close()


_ENDLESS = """
import sys
from pathlib import Path
from tests.runtime.tiers.stores import content, key, opened
store = opened(Path(sys.argv[1]), 10**5, max_writes=8)
for number in range(10**6):
    store.write(key(number % 500), content(number % 500))
    print(number, flush=True)
"""


def test_a_process_that_is_killed_leaves_whole_files(tmp_path: Path) -> None:
    """At any moment: what is there can be read, and what was half written is removed later."""
    for lines in (30, 31, 57):
        process = subprocess.Popen([sys.executable, "-c", _ENDLESS, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        for _ in range(lines):
            assert process.stdout.readline()
        process.kill()
        process.communicate()
    for left in (tmp_path / "new").iterdir():
        os.utime(left, (0, 0))
    store = opened(tmp_path)
    assert list((tmp_path / "new").iterdir()) == []
    there = files_in(tmp_path)
    assert len(there) > 0
    outcomes = [read(store, number) for number in range(500)]
    assert (outcomes.count("read"), outcomes.count("missing")) == (len(there), 500 - len(there))
    store.close()


def test_files_of_another_process_are_found_by_the_next_scan(tmp_path: Path) -> None:
    """And what it has deleted is known to be gone."""
    store, other = opened(tmp_path, 1000), opened(tmp_path, 1000)
    assert write(other, 500) == "written"
    assert write(store, 501) == "written"
    (tmp_path / path_of(key(501))).unlink()
    for number in range(130):  # an eighth of the limit makes a scan due
        write(store, number)
    until(lambda: key(500) in store and key(501) not in store)
    assert write(store, 500) == "present"
    assert store.stats().written == 131
    store.close()
    other.close()


@pytest.mark.parametrize("view", [np.zeros(ENTRY - 1, np.uint8), np.zeros(ENTRY, np.int8)])
def test_memory_of_another_kind_is_a_mistake(tmp_path: Path, view: np.ndarray) -> None:
    store = opened(tmp_path)
    with pytest.raises(ValueError, match="a block has 5000"):
        store.write(key(1), view)
    store.close()
