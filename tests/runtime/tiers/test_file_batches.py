"""Batches of files: who asks for many does not wait for their store, and what was forgotten reaches no store."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

from graphllm.runtime.tiers.files.block_files import BlockFiles
from graphllm.runtime.tiers.files.file_batches import FileBatch, FileBatches
from graphllm.runtime.tiers.host_memory import HostMemory
from tests.runtime.tiers.stores import key, until

SIZE = 4096


class Busy(HostMemory):
    """Memory whose entries nobody gets before they may."""

    def __init__(self) -> None:
        super().__init__({"blocks": 8}, {"blocks": (1, SIZE)})
        self.may = threading.Event()
        for number in range(8):
            self.pieces("blocks")[number] = number

    def entry(self, kind: str, number: int) -> np.ndarray:
        self.may.wait()
        return super().entry(kind, number)


def _batch(store: BlockFiles, numbers: range, writes: bool) -> FileBatch:
    return FileBatch(store, "blocks", [(key(number), number) for number in numbers], writes)


def test_who_asks_does_not_wait(tmp_path: Path) -> None:
    """All files are asked for before the store has one of them; then they are written, and read into other entries."""
    memory, store = Busy(), BlockFiles(tmp_path, SIZE, 1 << 30)
    batches = FileBatches(memory)
    writes = [_batch(store, range(first, first + 2), writes=True) for first in (0, 2)]
    for batch in writes:
        batches.begin(batch)
    assert not any(batch.done for batch in writes)
    memory.may.set()
    until(lambda: all(batch.done for batch in writes))
    assert [job.outcome for batch in writes for job in batch.jobs] == ["written"] * 4
    read = FileBatch(store, "blocks", [(key(number), number + 4) for number in range(4)] + [(key(9), 3)], False)
    batches.begin(read)
    until(lambda: read.done)
    assert [job.outcome for job in read.jobs] == ["read"] * 4 + ["missing"]
    assert [memory.entry("blocks", number)[0] for number in range(4, 8)] == [0, 1, 2, 3]
    batches.close()
    store.close()


def test_what_was_dropped_reaches_no_store(tmp_path: Path) -> None:
    memory, store = Busy(), BlockFiles(tmp_path, SIZE, 1 << 30)
    batches = FileBatches(memory)
    before, after = (_batch(store, range(at, at + 2), writes=True) for at in (0, 2))
    batches.begin(before)
    batches.drop()
    batches.begin(after)
    memory.may.set()
    until(lambda: before.done and after.done)
    assert [job.outcome for job in (*before.jobs, *after.jobs)] == ["dropped"] * 2 + ["written"] * 2
    batches.close()
    store.close()
