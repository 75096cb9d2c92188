"""What becomes of an engine of several ranks when a rank is gone. Ranks wait for each other in every layer, so none can
go on without the others. The first failure counts: it ends all ranks, and is raised in all that wait for their work."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from graphllm.config import ConfigError
from graphllm.host.silence import Silence, threads_of

_NOTICE = 2.0  # seconds in which the death of a rank is noticed after rank 0 has felt it
_HUNG = 8.0  # seconds without interest in the death of a rank, in which this process could have had it
_TICK = 0.25  # seconds between two looks at that

_log = logging.getLogger(__name__)


class RankError(RuntimeError):
    """A rank is gone, and the others with it."""


class SharedFate:
    """Of all ranks of an engine, as one process sees it. exits: this process ends when nobody asks after a failure, as
    the thread that would ask hangs in what it waits for."""

    def __init__(self, exits: bool = False) -> None:
        self._exits = exits
        self._failure: RankError | ConfigError | None = None
        self._failed, self._reported = threading.Event(), threading.Event()
        self._first = threading.Lock()
        self._ends: list[Callable[[], None]] = []

    @property
    def failed(self) -> bool:
        """Whether a rank is gone."""
        return self._failed.is_set()

    def ends(self, end: Callable[[], None]) -> None:
        """Have something done as soon as a rank is gone, in whichever thread notices."""
        self._ends.append(end)

    def fail(self, failure: RankError | ConfigError) -> None:
        """A rank is gone, or its settings could not be loaded."""
        with self._first:
            if self._failed.is_set():
                return
            self._failure = failure
            self._failed.set()
        for end in self._ends:
            end()
        if self._exits:
            threading.Thread(target=self._exit_unheard, name="graphllm-rank-failure", daemon=True).start()

    def _exit_unheard(self) -> None:
        silence = Silence(lambda: threads_of(os.getpid()), _TICK)
        while not self._reported.wait(_TICK):
            if silence.look() > _HUNG:
                _log.error("%s; the engine core hangs and ends", self._failure)
                os._exit(1)

    def settle(self) -> None:
        """The ranks are ended: nobody waits for their work."""
        self._reported.set()

    def check(self) -> None:
        """Raise RankError when a rank is gone, ConfigError where it could not be loaded."""
        if self._failed.is_set():
            assert self._failure is not None
            self._reported.set()
            raise type(self._failure)(str(self._failure))

    def check_soon(self) -> None:
        """The same, with the time that it takes to notice."""
        self._failed.wait(_NOTICE)
        self.check()
