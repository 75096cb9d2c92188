"""Reads weights into a GPU's memory while torch is imported, through the CUDA driver. No torch;
`graphllm.weights.loading.readers.begun_early` makes tensors of the memory.

Only for weights that a `BlockLayout` describes, and for a process that has not imported torch;
`graphllm.weights.loading.loader` is for the others, and gives every error.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from graphllm.config import ConfigError
from graphllm.host.cuda_driver import CudaDriver, CudaError
from graphllm.weights.checkpoint.files import opened, read_into
from graphllm.weights.loading.layout import BlockLayout, FileCopy
from graphllm.weights.loading.shared_work import SharedCounter, Todo, run

# While torch is imported each call of a reader waits for the interpreter, so there are more readers of larger chunks
# than where it is there.
_READERS = 8
_CHUNK = 32 << 20  # bytes of one read, and of a reader's pinned memory
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: a stream that does not wait for the others


class EarlyWeights:
    """Read from when this is made on, in threads, until all are there or `close`."""

    def __init__(self, find: Callable[[], BlockLayout | None]) -> None:
        """find: the layout, called in a thread; what it raises is left to the loader, which raises the same."""
        self._todo, self._counter = Todo[FileCopy](()), SharedCounter(0, None)
        self._pool = ThreadPoolExecutor(2, "graphllm-weights")
        self._begun = self._pool.submit(self._begin, find)
        self._reading = self._pool.submit(self._read_all)

    def begun(self) -> tuple[BlockLayout, Block] | None:
        """The layout and the memory, which is being filled; None where weights cannot be read this way."""
        return self._begun.result()

    def finish(self, report: Callable[[int, int], None]) -> None:
        """Wait until all are read. report: is called with the bytes read so far and in all; what it
        raises ends the reading.
        Raises what reading raised."""
        wait([self._begun])
        self._counter.report = report
        self._reading.result()
        self._pool.shutdown()

    def close(self) -> None:
        """Read no more."""
        wait([self._begun])
        self._todo.stop()
        self._pool.shutdown()

    def _begin(self, find: Callable[[], BlockLayout | None]) -> tuple[BlockLayout, Block] | None:
        """Allocate, and say what is to be read."""
        try:
            if (layout := find()) is None:
                return None
            driver = CudaDriver()
            driver.enter()
            block = Block(driver, layout)
        except (ConfigError, CudaError, OSError):
            return None
        self._todo = Todo(sorted(_chunks(layout)))
        self._counter = SharedCounter(sum(move.nbytes for move in layout.moves), None)
        return layout, block

    def _read_all(self) -> None:
        if (begun := self._begun.result()) is None:
            return
        layout, block = begun
        with opened({move.file for move in layout.moves}) as fds:

            def work() -> None:
                block.driver.enter()
                with _Slot(block.driver) as slot:
                    for move in self._todo:
                        read_into(slot.memory(move.nbytes), move.file, fds[move.file], move.offset)
                        slot.copy_to(block.address + move.at, move.nbytes)
                        self._counter.add(move.nbytes)

            run(work, _READERS, self._todo)


class Block:
    """Memory of a GPU, which torch takes by ``__cuda_array_interface__``, as bytes, and which goes with its last
    tensor. Raises CudaError where there is not enough of it."""

    def __init__(self, driver: CudaDriver, layout: BlockLayout) -> None:
        """Of that size, all zeros but for the constants."""
        self.driver, address = driver, ctypes.c_uint64()
        driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(layout.nbytes))
        self.address, self.nbytes = address.value, layout.nbytes
        driver.call("cuMemsetD8_v2", address, ctypes.c_ubyte(), ctypes.c_size_t(layout.nbytes))
        driver.call("cuCtxSynchronize")  # the readers' streams do not wait for that
        for at, values in layout.constants.items():
            place = ctypes.c_uint64(self.address + at)
            driver.call("cuMemcpyHtoD_v2", place, values, ctypes.c_size_t(len(values)))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3, "stream": None}

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self.driver.library.cuMemFree_v2(ctypes.c_uint64(self.address))


class _Slot:
    """Pinned memory of a reader, and the stream of its copies. A context manager."""

    def __init__(self, driver: CudaDriver) -> None:
        self._call, self._undo = driver.call, contextlib.ExitStack()
        self._pinned, self._stream = ctypes.c_void_p(), ctypes.c_void_p()

    def __enter__(self) -> _Slot:
        with self._undo:
            self._call("cuMemHostAlloc", ctypes.byref(self._pinned), ctypes.c_size_t(_CHUNK), 0)
            self._undo.callback(self._call, "cuMemFreeHost", self._pinned)
            self._call("cuStreamCreate", ctypes.byref(self._stream), _NON_BLOCKING)
            self._undo.callback(self._call, "cuStreamDestroy_v2", self._stream)
            self._undo = self._undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def memory(self, nbytes: int) -> memoryview:
        """The first ``nbytes`` bytes."""
        return memoryview((ctypes.c_ubyte * nbytes).from_address(self._pinned.value or 0)).cast("B")

    def copy_to(self, address: int, nbytes: int) -> None:
        """Copy the first ``nbytes`` bytes to the GPU, where they are when this returns."""
        place, count = ctypes.c_uint64(address), ctypes.c_size_t(nbytes)
        self._call("cuMemcpyHtoDAsync_v2", place, self._pinned, count, self._stream)
        self._call("cuStreamSynchronize", self._stream)


def _chunks(layout: BlockLayout) -> Iterator[FileCopy]:
    """The moves in parts that fit into a slot."""
    for move in layout.moves:
        for start in range(0, move.nbytes, _CHUNK):
            yield FileCopy(move.file, move.offset + start, min(_CHUNK, move.nbytes - start), move.at + start)
