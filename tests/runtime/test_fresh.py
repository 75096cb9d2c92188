"""Memory that is asked for is there, and no other."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from graphllm.runtime.fresh import FreshPages

PAGES, SIZE, SMALL = 64, 256 << 10, 4096


def _resident(tensor: torch.Tensor) -> list[bool]:
    """Of every 4 KB, as the kernel tells."""
    found = (ctypes.c_ubyte * (tensor.nbytes // SMALL))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), found) == 0
    return [bool(f & 1) for f in found]


def test_reach() -> None:
    memory = [mmap.mmap(-1, PAGES * SIZE) for _ in range(2)]
    tensors = [torch.frombuffer(m, dtype=torch.uint8).view(PAGES, SIZE) for m in memory]
    fresh = FreshPages(tensors)
    fresh.reach(3)
    if not any(_resident(tensors[0])):
        pytest.skip("this kernel does not populate memory when asked")
    for page in (3, 11, 12, PAGES - 1):
        fresh.reach(page)
        for tensor in tensors:
            there = _resident(tensor)
            assert all(there[: (page + 1) * SIZE // SMALL])
            assert not any(there[(page + 16) * SIZE // SMALL :])
            assert int(tensor[page].sum()) == 0


def test_no_tensors() -> None:
    FreshPages([]).reach(0)
