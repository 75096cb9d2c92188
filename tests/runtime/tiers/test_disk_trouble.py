"""BlockFiles and disks that are damaged, full, read-only or gone: never a wrong block, never an exception, and one line
in the log for each kind."""

from __future__ import annotations

import logging
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from graphllm.runtime.tiers.files.block_files import BlockFiles
from graphllm.runtime.tiers.files.disk_health import FIRST_PAUSE, DiskHealth
from graphllm.runtime.tiers.files.file_format import PAGE, file_bytes, path_of
from tests.runtime.tiers.stores import (
    BROKEN,
    ENTRY,
    FULL,
    READ_ONLY,
    Clock,
    FailingDisk,
    content,
    files_in,
    key,
    opened,
    read,
    until,
    write,
)
from tests.tiers import draws

_HEADER = 100  # bytes of the first page that mean something


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_bit_anywhere_is_noticed_or_means_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """200 places in the second tier. The file is deleted, and can be written anew."""
    draw, store, damaged = random.Random(0), opened(tmp_path), 0
    for number in range(draws(40, 200)):
        assert write(store, number) == "written"
        file = tmp_path / path_of(key(number))
        at = draw.choice([draw.randrange(file_bytes(ENTRY)), draw.randrange(_HEADER), PAGE + draw.randrange(ENTRY)])
        whole = bytearray(file.read_bytes())
        whole[at] ^= 1 << draw.randrange(8)
        file.write_bytes(whole)
        means_something = at < _HEADER or PAGE <= at < PAGE + ENTRY
        assert read(store, number) == ("damaged" if means_something else "read")
        assert file.exists() is not means_something
        assert (write(store, number), read(store, number)) == ("written" if means_something else "present", "read")
        damaged += means_something
    assert store.stats().damaged == damaged
    (line,) = _lines(caplog)
    assert str(tmp_path) in line
    assert "is damaged" in line
    store.close()


def _cut(file: Path, other: Path) -> None:
    file.write_bytes(file.read_bytes()[:7000])


def _lengthen(file: Path, other: Path) -> None:
    file.write_bytes(file.read_bytes() + b"more")


def _empty(file: Path, other: Path) -> None:
    file.write_bytes(b"")


def _zero(file: Path, other: Path) -> None:
    file.write_bytes(bytes(file_bytes(ENTRY)))


def _swap(file: Path, other: Path) -> None:
    aside = file.with_name("aside")
    file.rename(aside)
    other.rename(file)
    aside.rename(other)


def _folder(file: Path, other: Path) -> None:
    file.unlink()
    file.mkdir()


def _link(file: Path, other: Path) -> None:
    file.unlink()
    file.symlink_to(other)


def _pipe(file: Path, other: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("damage", [_cut, _lengthen, _empty, _zero, _swap, _folder, _link, _pipe])
@pytest.mark.parametrize("restarted", [False, True])
def test_damaged_files_are_dropped(tmp_path: Path, damage: object, restarted: bool) -> None:
    store = opened(tmp_path)
    for number in (1, 2):
        write(store, number)
    if restarted:
        store.close()
    damage(tmp_path / path_of(key(1)), tmp_path / path_of(key(2)))  # type: ignore[operator]
    if restarted:
        store = opened(tmp_path)
    swapped = damage is _swap
    assert read(store, 1) in (("missing",) if restarted and damage not in (_swap, _zero) else ("damaged",))
    assert read(store, 2) == ("damaged" if swapped else "read")
    assert store.stats().damaged == 1 + swapped
    assert [write(store, number) for number in (1, 2)] == ["written", "written" if swapped else "present"]
    assert [read(store, number) for number in (1, 2)] == ["read", "read"]
    store.close()


def test_a_folder_that_is_not_empty_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody knows what is in it. Its place is lost, others are not."""
    store, place = opened(tmp_path), tmp_path / path_of(key(1))
    (place / "mine").mkdir(parents=True)
    assert [read(store, 1), write(store, 1), write(store, 2), read(store, 2)] == [
        "damaged",
        "failed",
        "written",
        "read",
    ]
    assert (place / "mine").is_dir()
    assert "remove it" in _lines(caplog)[-1]
    store.close()


@pytest.mark.parametrize(
    ("error", "remedy"),
    [(FULL, "make room there"), (READ_ONLY, "let this user write"), (BROKEN, "look at the disk")],
)
def test_writing_pauses_and_begins_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: int, remedy: str
) -> None:
    disk, clock = FailingDisk(tmp_path), Clock()
    store = opened(tmp_path, disk=disk, health=DiskHealth(str(tmp_path), clock))
    assert write(store, 0) == "written"
    disk.write_error = error
    tries = 0
    for number in range(1, 200):
        outcome = write(store, number)
        assert outcome in ("failed", "dropped")
        tries += outcome == "failed"
        clock.now += FIRST_PAUSE / 4
    assert 3 <= tries <= 8  # each pause is twice as long
    (line,) = _lines(caplog)
    assert str(tmp_path) in line
    assert os.strerror(error) in line
    assert remedy in line
    disk.write_error = 0
    clock.now += 1000
    assert write(store, 1) == "written"
    assert (store.stats().failed_writes, store.stats().dropped) == (tries, 199 - tries)
    assert read(store, 0) == ("missing" if error == FULL else "read")  # the oldest makes room
    assert read(store, 1) == "read"
    disk.write_error = error
    assert write(store, 2) == "failed"
    assert len(_lines(caplog)) == 1 + (clock.now > 600)
    store.close()


def test_a_disk_that_cannot_be_read_has_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = FailingDisk(tmp_path)
    store = opened(tmp_path, disk=disk)
    for number in range(5):
        write(store, number)
    disk.read_error = BROKEN
    assert [read(store, number) for number in range(5)] == ["failed"] * 5
    disk.read_error = 0
    assert [read(store, number) for number in range(5)] == ["read"] * 5
    assert store.stats().failed_reads == 5
    (line,) = _lines(caplog)
    assert "cannot be read" in line
    store.close()


def test_a_folder_that_vanishes(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store = opened(folder)
    assert write(store, 1) == "written"
    shutil.rmtree(folder)
    assert [read(store, 1), write(store, 1), read(store, 1)] == ["missing", "written", "read"]
    store.close()


def test_a_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    store = opened(tmp_path / "file" / "store")
    assert [write(store, 1), write(store, 2), read(store, 1)] == ["dropped", "dropped", "missing"]
    (line,) = _lines(caplog)
    assert "blocks cannot be written (Not a directory)" in line
    store.close()
    assert (tmp_path / "file").read_text() == "in the way"


def test_files_of_another_size_belong_to_nobody(tmp_path: Path) -> None:
    """A folder is of one size; a store of another size drops what it finds there."""
    store = opened(tmp_path)
    write(store, 1)
    store.close()
    store = opened(tmp_path, entry=5 * PAGE)
    assert read(store, 1, 5 * PAGE) == "missing"
    assert files_in(tmp_path) == []
    store.close()


_LIMITED = """
import resource, sys
from pathlib import Path
from graphllm.runtime.tiers.files.disk_health import DiskHealth
from tests.runtime.tiers.stores import Clock, opened, read, write
folder, clock = Path(sys.argv[1]), Clock()
store = opened(folder, health=DiskHealth(str(folder), clock))
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
assert [write(store, 1), write(store, 2), read(store, 1)] == ["failed", "dropped", "missing"]
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
clock.now += 10
assert [write(store, 1), read(store, 1)] == ["written", "read"]
assert list((folder / "new").iterdir()) == []
store.close()
"""


def test_a_file_that_the_system_does_not_let_grow(tmp_path: Path) -> None:
    """The operating system itself refuses the end of the file: nothing of it stays."""
    done = subprocess.run([sys.executable, "-c", _LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("blocks cannot be written (File too large)") == 1
    assert "Traceback" not in done.stderr


def test_what_a_thread_does_not_expect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A mistake in the store itself ends a job, and no thread."""

    class Wrong(FailingDisk):
        def has(self, path: Path, num_bytes: int) -> bool:
            raise RuntimeError("no such thing")

    store = BlockFiles(tmp_path, ENTRY, 10**6, disk=Wrong(tmp_path), writers=1)
    for number in range(3):
        job = store.write(key(number), content(number))
        until(lambda job=job: job.done)
        assert job.outcome == "failed"
    assert read(store, 1) == "missing"
    store.close()
