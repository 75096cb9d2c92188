"""The format of files of the disk tier: every change of a file is noticed."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from graphllm.runtime.tiers.files.file_format import (
    PAGE,
    DamagedFileError,
    check,
    checksum,
    key_of,
    path_of,
    write_header,
)
from tests.runtime.tiers.stores import content, key
from tests.tiers import draws

_SIZE = 3 * 8192 + 1234  # rows of the checksum, and a rest
_FACTS = 8 + 4 + 4 + 8 + 8 + 64 + 4  # bytes of a header that mean something


@settings(max_examples=draws(60, 600), deadline=None)
@given(at=st.integers(0, _SIZE - 1), bit=st.integers(0, 7), other=st.integers(0, _SIZE - 1))
def test_a_checksum_sees_flipped_bits_and_moved_words(at: int, bit: int, other: int) -> None:
    whole = content(1, _SIZE)
    before = checksum(whole)
    changed = whole.copy()
    changed[at] ^= 1 << bit
    assert checksum(changed) != before
    twice = changed.copy()
    twice[other] ^= 1 << bit  # often in the same row, and the highest bit of a number
    assert (checksum(twice) == before) is (at == other)
    words = whole[: 3 * 8192].view(np.uint64)
    first, second = at // 8 % len(words), other // 8 % len(words)
    swapped = whole.copy()
    swapped[: 3 * 8192].view(np.uint64)[[first, second]] = words[[second, first]]
    assert (checksum(swapped) == before) is bool(words[first] == words[second])


@pytest.mark.parametrize("unit", [512, 4096, 8192])
def test_a_checksum_sees_moved_and_emptied_sectors(unit: int) -> None:
    whole = content(2, 8 * 8192)
    units = whole.reshape(-1, unit)
    for first, second in ((0, 1), (0, 3), (1, 2), (2, 7)):
        moved = units.copy()
        moved[[first, second]] = units[[second, first]]
        assert checksum(moved.reshape(-1)) != checksum(whole)
        moved = units.copy()
        moved[first] = units[second]
        assert checksum(moved.reshape(-1)) != checksum(whole)
        moved[first] = 0
        assert checksum(moved.reshape(-1)) != checksum(whole)


@settings(max_examples=draws(60, 600), deadline=None)
@given(at=st.integers(0, _FACTS - 1), bit=st.integers(0, 7))
def test_a_damaged_header_is_refused(at: int, bit: int) -> None:
    page, body = np.zeros(PAGE, np.uint8), content(3)
    write_header(page, key(3), body)
    check(page, key(3), body)
    page[at] ^= 1 << bit
    with pytest.raises(DamagedFileError, match="no header"):
        check(page, key(3), body)


def test_a_file_of_another_block_is_refused() -> None:
    page, body = np.zeros(PAGE, np.uint8), content(3)
    write_header(page, key(3), body)
    with pytest.raises(DamagedFileError, match="another block"):
        check(page, key(4), body)
    with pytest.raises(DamagedFileError, match="a block here has 4999"):
        check(page, key(3), body[:-1])


@given(st.binary(min_size=2, max_size=64))
def test_a_name_tells_the_key(key: bytes) -> None:
    path = path_of(key)
    assert key_of(path.name) == key
    assert path.parts[:2] == (key.hex()[:2], key.hex()[2])


@pytest.mark.parametrize("name", ["", "ab", "abc", "ABCD", "abcd.part", "..", "x" * 8, "ab" * 65])
def test_other_names_are_no_keys(name: str) -> None:
    assert key_of(name) is None
