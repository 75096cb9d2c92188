"""A GPU as far as copies see it: streams and events. What may happen late or in another order does so, by chance."""

from __future__ import annotations

import ctypes
import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from graphllm.host.cuda_driver import CudaError
from graphllm.runtime.tiers import cuda_copies


class SimulatedGPU:
    """steps: the stream of the steps.
    most_queued: copies that a stream had at a time.
    failing: copies that the driver takes before it refuses one; -1: it takes all.
    """

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        self._random, self._lock = random.Random(seed), threading.RLock()
        self._streams: list[_Stream] = []
        self.failing = -1
        self.most_queued, self._queued = 0, Counter[int]()
        self.steps = self.stream()
        gpu = SimpleNamespace(Stream=self.stream, Event=self.event, current_stream=lambda: self.steps)
        monkeypatch.setattr(torch, "cuda", gpu)
        monkeypatch.setattr(cuda_copies, "CudaDriver", lambda: _Driver())
        monkeypatch.setattr(cuda_copies, "BatchCopy", lambda driver: self)

    def stream(self) -> _Stream:
        found = _Stream(self, len(self._streams))
        self._streams.append(found)
        return found

    def event(self, enable_timing: bool = False, blocking: bool = False) -> _Event:
        return _Event(self)

    def copy(self, to: np.ndarray, of: np.ndarray, nbytes: int, stream: int, order: int) -> None:
        """As `BatchCopy.copy`."""
        if self.failing == 0:
            raise CudaError("cuMemcpyBatchAsync failed: made to (code 2)")
        self.failing -= 1

        def run() -> None:
            self._queued[stream] -= 1
            for target, source in zip(to.tolist(), of.tolist(), strict=True):
                ctypes.memmove(target, source, nbytes)

        with self._lock:
            self._queued[stream] += 1
            self.most_queued = max(self.most_queued, self._queued[stream])
            self.put(self._streams[stream], run)

    def put(self, stream: _Stream, run: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> None:
        with self._lock:
            stream.work.append((run, ready))

    def advance(self) -> None:
        """Some of what can run does."""
        with self._lock:
            for _ in range(self._random.randrange(4)):
                ready = [stream for stream in self._streams if stream.work and stream.work[0][1]()]
                if not ready:
                    return
                self._random.choice(ready).work.popleft()[0]()


class _Stream:
    def __init__(self, gpu: SimulatedGPU, handle: int) -> None:
        self._gpu, self.cuda_stream = gpu, handle
        self.work = deque[tuple[Callable[[], None], Callable[[], bool]]]()

    def wait_event(self, event: _Event) -> None:
        wanted = event.asked
        self._gpu.put(self, lambda: None, lambda: event.done >= wanted)

    def synchronize(self) -> None:
        while self.work:
            self._gpu.advance()


class _Event:
    def __init__(self, gpu: SimulatedGPU) -> None:
        self._gpu, self.asked, self.done = gpu, 0, 0

    def record(self, stream: _Stream | None = None) -> None:
        self.asked += 1
        number = self.asked
        self._gpu.put(stream or self._gpu.steps, lambda: setattr(self, "done", number))

    def query(self) -> bool:
        self._gpu.advance()
        return self.done == self.asked

    def synchronize(self) -> None:
        while not self.query():
            pass

    def elapsed_time(self, end: Any) -> float:
        assert min(self.asked, self.done, end.done) > 0
        return 1.0


class _Driver:
    def current(self) -> int:
        return 1

    def use(self, context: int) -> None:
        assert context == 1

    def register(self, address: int, nbytes: int) -> None:
        """As `CudaDriver`."""

    def unregister(self, address: int) -> None:
        """As `CudaDriver`."""
