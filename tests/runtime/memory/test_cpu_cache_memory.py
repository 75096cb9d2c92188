"""Memory that is asked for is there, and no other."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest

from graphllm.config import ConfigError
from graphllm.runtime.memory.cpu_cache_memory import CacheMemory
from tests.waiting import until

PAGES, SIZE, SMALL = 64, 256 << 10, 4096


def _resident(tensor: np.ndarray) -> list[bool]:
    """Of every 4 KB that lie wholly in it, as the kernel tells."""
    first = -(-tensor.ctypes.data // SMALL) * SMALL
    length = (tensor.ctypes.data + tensor.nbytes - first) // SMALL
    found = (ctypes.c_ubyte * length)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(length * SMALL), found) == 0
    return [bool(f & 1) for f in found]


def _until_resident(memory: CacheMemory, pages: int) -> None:
    try:
        mmap.mmap(-1, SMALL).madvise(23)  # MADV_POPULATE_WRITE
    except OSError:
        pytest.skip("this kernel does not populate memory when asked")
    until(lambda: all(all(_resident(t)[: pages * SIZE // SMALL - 1]) for t in memory.tensors))


def test_reach() -> None:
    memory = CacheMemory(2, PAGES, SIZE, first=0)
    assert not any(any(_resident(t)) for t in memory.tensors)
    memory.reach(3)
    _until_resident(memory, 4)
    for page in (3, 11, 12, PAGES - 1):
        memory.reach(page)
        for tensor in memory.tensors:
            there = _resident(tensor)
            assert all(there[: (page + 1) * SIZE // SMALL - 1])
            assert not any(there[(page + 24) * SIZE // SMALL :])
            assert tensor.ctypes.data % 64 == 0
            assert int(tensor[page].sum()) == 0


def test_memory_that_malloc_kept_is_not_cleared_at_once() -> None:
    used = [np.ones(20 << 20, dtype=np.uint8) for _ in range(6)]
    above = np.ones(200_000, dtype=np.uint8)
    del used
    memory = CacheMemory(1, PAGES, SIZE, first=0)
    assert not any(_resident(memory.tensors[0]))
    assert above.all()


def test_more_than_there_is() -> None:
    with pytest.raises(ConfigError, match=r"kv cache: 1099511627776 blocks do not fit .*lower --kv-cache-memory-bytes"):
        CacheMemory(1, 1 << 40, SIZE)


def test_first_of_it_comes_by_itself() -> None:
    memory = CacheMemory(2, PAGES, SIZE, first=2 * 16 * SIZE)
    _until_resident(memory, 16)
    assert not any(any(_resident(t)[32 * SIZE // SMALL :]) for t in memory.tensors)


def test_more_of_it_comes_before_it_is_reached() -> None:
    memory = CacheMemory(2, PAGES, SIZE, first=2 * 8 * SIZE)
    _until_resident(memory, 8)
    memory.reach(3)
    assert not any(any(_resident(t)[8 * SIZE // SMALL :]) for t in memory.tensors)
    memory.reach(4)
    _until_resident(memory, 16)
    memory.reach(PAGES - 1)
    memory.reach(PAGES - 1)
    assert all(all(_resident(t)) for t in memory.tensors)


def test_no_tensors() -> None:
    memory = CacheMemory(0, 5, SIZE)
    memory.reach(4)
    assert memory.tensors == []
