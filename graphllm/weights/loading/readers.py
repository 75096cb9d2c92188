"""Reads bytes of files into tensors: in large chunks, by several threads, through pinned memory to a GPU.

A `Chunk` goes straight into the parameter's memory where its bytes can stay as they are, else through a small staging
buffer. There is no memory map: its pages would count as resident memory and arrive one fault at a time.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor

from graphllm.weights.checkpoint.files import read_into
from graphllm.weights.loading.early_reading import Block, EarlyWeights
from graphllm.weights.loading.layout import BlockLayout, TensorPlace
from graphllm.weights.loading.shared_work import SharedCounter, Todo, run

Progress = Callable[[int, int], None]

_GRAIN = 32704  # numbers, whole cache lines of them; torch splits elementwise work from 32768 on among its threads
_READERS = 4  # threads; on a warm page cache they share the copying and the page faults of fresh memory
_SLOTS = 2  # pinned slots of a reader: one is read into while the other is copied to the device


@dataclass(frozen=True)
class Bytes:
    """Numbers of a file: ``shape`` numbers of ``dtype`` from ``offset`` on, at ``strides`` counted in numbers."""

    file: Path
    fd: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """What is read: from the first number to the last one, with what lies between."""
        if 0 in self.shape:
            return 0
        return (1 + sum((n - 1) * by for n, by in zip(self.shape, self.strides, strict=True))) * self.dtype.itemsize

    @property
    def dense(self) -> bool:
        """Nothing lies between them."""
        return self.nbytes == math.prod(self.shape) * self.dtype.itemsize

    def rows(self, start: int, stop: int) -> Bytes:
        """Entries of dimension 0."""
        at = self.offset + start * self.strides[0] * self.dtype.itemsize
        return Bytes(self.file, self.fd, at, self.dtype, (stop - start, *self.shape[1:]), self.strides)

    def read(self, into: Tensor) -> Tensor:
        """The numbers, read into the bytes of ``into``. Raises WeightError when the file ends before them."""
        nbytes = self.nbytes
        read_into(into[:nbytes].numpy().data, self.file, self.fd, self.offset)
        return into[:nbytes].view(self.dtype).as_strided(self.shape, self.strides)


class ReadJob(Protocol):
    """A piece of work of a reader. file, offset: where it reads, for the order. nbytes: that it reads."""

    @property
    def file(self) -> Path: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def staging(self) -> int:
        """Bytes of staging memory that it needs on the host."""

    def run(self, stage: Tensor, device: torch.device) -> None:
        """Read and put where it belongs. stage: bytes, pinned for a GPU, in use until the stream has come this far."""


@dataclass(frozen=True)
class Chunk:
    """One read of few enough bytes that become ``dst``, of the same shape and any dtype."""

    source: Bytes
    dst: Tensor

    @property
    def file(self) -> Path:
        return self.source.file

    @property
    def offset(self) -> int:
        return self.source.offset

    @property
    def nbytes(self) -> int:
        return self.source.nbytes

    @property
    def direct(self) -> bool:
        """The bytes are the parameter's as they stand."""
        return self.dst.dtype == self.source.dtype and self.dst.is_contiguous() and self.source.dense

    @property
    def staging(self) -> int:
        return 0 if self.direct else self.nbytes

    def run(self, stage: Tensor, device: torch.device) -> None:
        if device.type == "cpu" and self.direct:
            # A single number may have any stride, with which its bytes could not be viewed.
            self.source.read(into=self.dst.as_strided((self.dst.numel(),), (1,)).view(torch.uint8))
            return
        numbers = self.source.read(into=stage)
        # Cast and transpose on the device: a copy that does both from the host would do them on the CPU.
        self.put(numbers if self.direct else numbers.to(device, non_blocking=True))

    def put(self, numbers: Tensor) -> None:
        """Finish what was read, on the parameter's device."""
        if self.dst.is_cuda:
            self.dst.copy_(numbers, non_blocking=True)
        else:
            _copy_serially(self.dst, numbers)


def read_all(jobs: Sequence[ReadJob], device: torch.device, progress: Progress | None) -> None:
    """Run all jobs in the order of their places in the files. progress(done, total): bytes read so far; called from
    reader threads, one call at a time."""
    jobs = sorted(jobs, key=lambda job: (str(job.file), job.offset))
    counter = SharedCounter(sum(job.nbytes for job in jobs), progress)
    if device.type == "cuda":
        _read_to_cuda(jobs, device, counter)
    else:
        _read_on_cpu(jobs, device, counter)


class Loading:
    """Parameters by name; a thread fills their memory. A context manager: its end ends that thread."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        read: Callable[[Progress], None] = lambda report: None,
        progress: Progress | None = None,
    ) -> None:
        """read: fills them, and is given what it reports its progress to."""
        self.tensors, self._progress, self._stopped = tensors, progress, threading.Event()
        pool = ThreadPoolExecutor(1, "graphllm-weights")
        self._reading = pool.submit(read, self._report)
        pool.shutdown(wait=False)

    def _report(self, done: int, total: int) -> None:
        if self._stopped.is_set():
            raise InterruptedError("nobody waits for the weights any more")
        if self._progress is not None:
            self._progress(done, total)

    def finish(self) -> dict[str, Tensor]:
        """The parameters, when all of them are there. Raises what reading raised."""
        self._reading.result()
        return self.tensors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        wait([self._reading])


def begun_early(early: EarlyWeights, layout: BlockLayout, block: Block) -> Loading:
    """The parameters that ``early`` is reading into a block of a GPU's memory."""
    whole = torch.as_tensor(block, device="cuda")
    return Loading({name: _view(whole, place) for name, place in layout.places.items()}, early.finish)


def _view(block: Tensor, place: TensorPlace) -> Tensor:
    """A parameter in the bytes of the block."""
    dtype: torch.dtype = getattr(torch, place.dtype)
    nbytes = math.prod(place.shape) * dtype.itemsize
    return block[place.at : place.at + nbytes].view(dtype).view(place.shape)


def _read_on_cpu(jobs: Sequence[ReadJob], device: torch.device, counter: SharedCounter) -> None:
    todo = Todo(jobs)
    size = max((job.staging for job in jobs), default=0)

    def fill() -> None:
        stage = torch.empty(size, dtype=torch.uint8)
        for job in todo:
            job.run(stage, device)
            counter.add(job.nbytes)

    run(fill, min(_READERS, len(os.sched_getaffinity(0))), todo)


def _copy_serially(dst: Tensor, src: Tensor) -> None:
    """A copy in parts too small for torch to split among its threads: they would spin against the other readers."""
    rows = max(1, _GRAIN // math.prod(dst.shape[1:]))
    for part, numbers in zip(dst.split(rows), src.split(rows), strict=True):
        part.copy_(numbers)


def _read_to_cuda(jobs: Sequence[ReadJob], device: torch.device, counter: SharedCounter) -> None:
    """Each reader has a stream of its own and pinned slots: it reads into one while the other is being copied."""
    todo = Todo(jobs)
    size = max((job.nbytes for job in jobs if isinstance(job, Chunk)), default=0)

    def fill() -> None:
        stream = torch.cuda.Stream(device)
        slots = [(torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(_SLOTS)]
        with torch.cuda.device(device), torch.cuda.stream(stream):
            for i, job in enumerate(todo):
                slot, copied = slots[i % _SLOTS]
                copied.synchronize()  # returns at once for an event that was never recorded
                job.run(slot, device)
                copied.record(stream)
                counter.add(job.nbytes)
        stream.synchronize()

    torch.cuda.synchronize(device)  # the parameters' memory may have been in use on another stream until now
    run(fill, _READERS, todo)
