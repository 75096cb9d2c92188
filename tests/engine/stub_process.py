"""A core process with a stub core: what `COMMAND` starts."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from graphllm.config import ConfigError
from graphllm.engine.process.core_loop import run_core
from graphllm.engine.requests.request import CoreInfo, CoreStats, EngineCoreOutput, EngineRequest, QueueFullError

COMMAND = (sys.executable, __file__)
VOCAB, CONTEXT = 320, 96


def expected(prompt: list[int], count: int, seed: int = 0) -> list[int]:
    """The tokens of a request."""
    return [(sum(prompt) * 31 + seed + k * 7) % VOCAB for k in range(count)]


class StubCore:
    """Token k of a request is a formula of its prompt and seed. What goes wrong, and when, is a setting."""

    def __init__(
        self,
        phase: Callable[[str, float], None],
        load: str = "",
        step: float = 0.0,
        fail_at: int = -1,
        hang_at: int = -1,
        queue: int = 10_000,
        closed: str = "",
        kernels: int = 0,
        cold: int = 0,
    ) -> None:
        if load == "error":
            raise RuntimeError("no weights here")
        if load == "config":
            raise ConfigError("kv cache: too small; give more")
        if load == "exit":
            os._exit(3)
        if load == "hang":
            time.sleep(1000)
        phase("weights", 0.25)
        self.info = CoreInfo(CONTEXT, VOCAB, 64, 64, 8, 100, 800, 20, 1024, "stub")
        self._step, self._fail_at, self._hang_at, self._queue, self._closed = step, fail_at, hang_at, queue, closed
        self._live: dict[str, tuple[EngineRequest, int]] = {}
        self._news: list[EngineCoreOutput] = []
        self._steps = self.kernels_done = 0
        self._kernels, self._cold = kernels, cold

    @property
    def unfinished(self) -> int:
        return len(self._live)

    def add(self, request: EngineRequest) -> None:
        if len(self._live) >= self._queue:
            raise QueueFullError(f"{len(self._live)} requests wait; try again later")
        if not request.prompt:
            raise ConfigError("prompt is empty")
        self._live[request.id] = (request, 0)

    def abort(self, ids: Iterable[str]) -> None:
        for id in ids:
            if self._live.pop(id, None):
                self._news.append(EngineCoreOutput(id, [], "abort"))

    def step(self) -> list[EngineCoreOutput]:
        self._steps += 1
        if self._steps == self._fail_at:
            raise ZeroDivisionError("the stub fails as told")
        if self._steps == self._hang_at:
            time.sleep(1000)
        for _ in range(self._kernels):
            time.sleep(self._step / self._kernels)
            self.kernels_done += 1
        if not self._kernels:
            time.sleep(self._step)
        news, self._news = self._news, []
        for id, (request, done) in list(self._live.items()):
            last = done + 1 == request.limit
            news.append(
                EngineCoreOutput(
                    id, [(sum(request.prompt) * 31 + request.seed + done * 7) % VOCAB], "length" if last else None
                )
            )
            self._live[id] = (request, done + 1)
            if last:
                del self._live[id]
        return news

    def stats(self) -> CoreStats:
        return CoreStats(steps=self._steps, running=len(self._live), waiting=self._cold)

    wakeup_fd = None

    def hear(self) -> None:
        pass

    def warm_up(self) -> bool:
        if self._cold:
            assert not self._live
            try:
                time.sleep(0.05)
            except BaseException as torn:  # as a capture of a graph
                raise RuntimeError("interrupted") from torn
            self._cold -= 1
        return self._cold > 0

    def check_health(self) -> None:
        pass

    def reset_prefix_cache(self) -> bool:
        return not self._live

    def close(self) -> None:
        if self._closed:
            Path(self._closed).touch()


def _run() -> None:
    """What is imported beforehand is there once the settings are known, so only where those are read meanwhile."""
    told = threading.Event()

    def preload() -> None:
        if "--meanwhile" in sys.argv:
            told.wait()

    run_core(lambda settings, phase: StubCore(phase, **settings), preload, lambda settings: told.set())


if __name__ == "__main__":
    _run()
