"""A file's bytes in memory: the same however the operating system keeps them, and in which pages they lie."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from graphllm import pages
from graphllm.pages import HUGE, file_bytes


def _written(path: Path, size: int, at_once: int) -> bytes:
    """Random bytes, also in a file: written so many at once, which is what decides the size of the pages in memory."""
    data = np.random.default_rng(size).bytes(size)
    with path.open("wb", buffering=0) as file:
        for at in range(0, size, at_once):
            file.write(data[at : at + at_once])
    return data


def _maps(memory: np.ndarray) -> Iterator[tuple[int, int, str, dict[str, int]]]:
    """What the operating system says of the parts of a map that hold these bytes: start, stop, rights, and sizes in
    bytes, and flags, by name."""
    begin, end = memory.ctypes.data, memory.ctypes.data + len(memory)
    for part in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)[1:]:
        start, stop, rights = re.match(r"(\w+)-(\w+) (\S+)", part).groups()  # type: ignore[union-attr]
        if int(start, 16) < end and begin < int(stop, 16):
            sizes = {n: int(v) << 10 for n, v in re.findall(r"^(\w+): +(\d+) kB", part, flags=re.M)}
            flags = re.findall(r"^VmFlags:(.*)$", part, flags=re.M)[0].split()
            yield int(start, 16), int(stop, 16), rights, sizes | dict.fromkeys(flags, 1)


@pytest.mark.parametrize("at_once", [4096, 100_001, HUGE])
@pytest.mark.parametrize("size", [1, 4097, HUGE, 2 * HUGE - 1, 2 * HUGE + 5, 11 * HUGE + 77])
def test_the_bytes_are_the_files(size: int, at_once: int, tmp_path: Path) -> None:
    data = _written(tmp_path / "file", size, at_once)
    found = file_bytes(tmp_path / "file")
    assert found.tobytes() == data
    assert not found.flags.writeable
    assert all(rights[:2] == "r-" for _, _, rights, _ in _maps(found))


needs_large_pages = pytest.mark.skipif(not pages._gives_large_pages(), reason="this system has no pages of 2 MB")


@needs_large_pages
def test_small_pages_are_replaced_by_large_ones(tmp_path: Path) -> None:
    data = _written(tmp_path / "file", 20 * HUGE, 4096)
    with mock.patch.object(pages, "_READ", 3 * HUGE):  # several reads
        found = file_bytes(tmp_path / "file")
    own = [(stop - start, sizes) for start, stop, rights, sizes in _maps(found) if rights[3] == "p"]
    assert sum(size for size, _ in own) >= 19 * HUGE
    assert all("hg" in sizes for _, sizes in own)  # asked for in large pages; how many there are is the system's affair
    assert found.tobytes() == data


def test_large_pages_stay_mapped(tmp_path: Path) -> None:
    _written(tmp_path / "file", 20 * HUGE, HUGE)
    with mock.patch.object(pages, "available", return_value=0):
        as_it_is = file_bytes(tmp_path / "file")
    as_it_is[::4096].sum()
    large = sum(sizes["FilePmdMapped"] for *_, sizes in _maps(as_it_is))
    if large < 18 * HUGE:
        pytest.skip("this file system does not keep files in pages of 2 MB, or memory has none left")
    found = file_bytes(tmp_path / "file")
    assert sum(stop - start for start, stop, rights, _ in _maps(found) if rights[3] == "s") >= large


@needs_large_pages
def test_parts_between(tmp_path: Path) -> None:
    """Of windows 0 to 9, those that the system says it keeps in large pages stay as they are."""
    data = _written(tmp_path / "file", 11 * HUGE, 4096)
    told = [(1, 3), (3, 4), (8, 9)]

    def tells(file: object, request: int, asked: bytearray) -> int:
        numbers = np.frombuffer(asked, dtype=np.uint64)
        first, place = int(numbers[2]), int(numbers[5])
        answer = (pages.ctypes.c_uint64 * (3 * len(told))).from_address(place)
        answer[:] = [n for a, b in told for n in (first + a * HUGE, first + b * HUGE, 64)]
        return len(told)

    with mock.patch.object(pages.fcntl, "ioctl", tells):
        found = file_bytes(tmp_path / "file")
    first = -(-found.ctypes.data // HUGE) * HUGE
    shared = {
        w
        for start, stop, rights, _ in _maps(found)
        for w in range(10)
        if rights[3] == "s" and start <= first + w * HUGE < stop
    }
    assert shared == {1, 2, 3, 8}
    assert found.tobytes() == data


@needs_large_pages
def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    data = _written(tmp_path / "file", 7 * HUGE, HUGE)
    with mock.patch.object(pages.fcntl, "ioctl", side_effect=OSError(errno.ENOTTY, "no such request")):
        found = file_bytes(tmp_path / "file")
    assert sum(stop - start for start, stop, rights, _ in _maps(found) if rights[3] == "p") >= 6 * HUGE
    assert found.tobytes() == data


@pytest.mark.parametrize("reason", ["more than half of memory", "no large pages", "no such setting"])
def test_nothing_is_copied_in_vain(reason: str, tmp_path: Path) -> None:
    data = _written(tmp_path / "file", 4 * HUGE, 4096)
    setting = tmp_path / "setting"
    if reason != "no such setting":
        setting.write_text("always madvise [never]\n" if reason == "no large pages" else "always [madvise] never\n")
    free = 8 * HUGE - 2 if reason == "more than half of memory" else 1 << 40
    with mock.patch.object(pages, "available", return_value=free), mock.patch.object(pages, "_SETTING", setting):
        found = file_bytes(tmp_path / "file")
    assert {rights for _, _, rights, _ in _maps(found)} == {"r--s"}
    assert found.tobytes() == data


def test_the_whole_map_goes_with_the_last_who_holds_it(tmp_path: Path) -> None:
    _written(tmp_path / "file", 30 * HUGE, 4096)
    found = file_bytes(tmp_path / "file")
    begin, end = found.ctypes.data, found.ctypes.data + len(found)
    part = found[5 * HUGE : 6 * HUGE]
    del found
    assert part[0] == (tmp_path / "file").read_bytes()[5 * HUGE]
    del part
    lines = Path("/proc/self/maps").read_text().splitlines()
    taken = [tuple(int(x, 16) for x in line.split()[0].split("-")) for line in lines]
    # Others may have been given some of it since, but not such stretches.
    assert not [1 for start, stop in taken if min(stop, end) - max(start, begin) > 10 * HUGE]
