"""What a run records: the seconds of each test, and what its main thread did meanwhile.

A process of the run writes a JSON line a test to build/test-times/; `tests/times.py` makes tables of that. The clock is
read where the functions of CAUSES begin and end; what is not in one of them is the test's own.
"""

from __future__ import annotations

import collections
import functools
import importlib
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.times import FOLDER

OWN = "the test and what it calls"
CAUSES = {  # what goes on in these functions
    "compiling": ("graphllm.compile.pipeline:compile_model",),
    "Triton's interpreter": ("triton.runtime.interpreter:GridExecutor.__call__",),
    "transformers": (
        "transformers:PreTrainedModel.__call__",
        "transformers:PreTrainedModel.from_pretrained",
        "transformers:PreTrainedModel.save_pretrained",
        "transformers:GenerationMixin.generate",
    ),
    "other processes": (
        "subprocess:Popen.__init__",
        "subprocess:Popen.wait",
        "subprocess:Popen.communicate",
        "tests.waiting:until",
        "time:sleep",
    ),
}


class Clock:
    """Seconds of the main thread by cause."""

    def __init__(self) -> None:
        self.seconds: collections.Counter[str] = collections.Counter()
        self._causes, self._since = [OWN], time.perf_counter()

    def turn(self) -> None:
        """What has passed belongs to the cause that is on top."""
        now = time.perf_counter()
        self.seconds[self._causes[-1]] += now - self._since
        self._since = now

    def during(self, cause: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn``, timed."""
        main = threading.main_thread()

        @functools.wraps(fn)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not main:
                return fn(*args, **kwargs)
            self.turn()
            self._causes.append(cause)
            try:
                return fn(*args, **kwargs)
            finally:
                self.turn()
                self._causes.pop()

        return timed

    def watch(self) -> None:
        """Time the functions of CAUSES, wherever they are imported from now on."""
        for cause, names in CAUSES.items():
            for name in names:
                module, _, path = name.partition(":")
                *outer, own = path.split(".")
                holder = functools.reduce(getattr, outer, importlib.import_module(module))
                found = vars(holder).get(own) or getattr(holder, own)
                timed = self.during(cause, found.__func__ if isinstance(found, classmethod) else found)
                setattr(holder, own, classmethod(timed) if isinstance(found, classmethod) else timed)


class Recorder:
    """Of one process: a line for every test."""

    def __init__(self, worker: str) -> None:
        FOLDER.mkdir(parents=True, exist_ok=True)
        self._file = (FOLDER / f"{worker}.jsonl").open("w")
        self._clock = Clock()
        self._clock.watch()

    def _write(self, test: str, seconds: float) -> None:
        causes = {cause: round(s, 3) for cause, s in self._clock.seconds.items() if s >= 0.001}
        self._file.write(json.dumps({"test": test, "seconds": round(seconds, 4), "causes": causes}) + "\n")
        self._file.flush()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._clock.turn()
        self._clock.seconds.clear()
        begun = time.perf_counter()
        try:
            return (yield)
        finally:
            self._clock.turn()
            self._write(item.nodeid, time.perf_counter() - begun)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Any:
        begun = time.perf_counter()
        try:
            return (yield)
        finally:
            self._clock.seconds.clear()
            self._clock.seconds["importing"] = seconds = time.perf_counter() - begun
            self._write("collecting", seconds)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("collectonly"):
        return
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        for file in FOLDER.glob("*.jsonl"):
            file.unlink()
    if worker or not config.getoption("numprocesses", None):  # the process that hands out tests runs none
        config.pluginmanager.register(Recorder(worker or "main"))
