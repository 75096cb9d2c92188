"""Engine cores that have experts together make their steps together, in waves.

Every step of a wave begins with an agreement of all cores: how many tokens they pad theirs to, and whether any has
work. A core without requests runs the step as well, with padding only. The wave ends, for all at the same agreement,
when none has work. Then cores sleep until a request comes to one of them; that core rings the bells of the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

_SOON = 2.0  # seconds after a failed collective until a process that is to blame is seen to have ended


class PeerError(RuntimeError):
    """Another engine core, without which this one cannot go on, is gone."""


class Agreement(NamedTuple):
    """What a step of all cores is padded to: tokens, 0 for no step. mixed: not all tokens are sequences that decode."""

    tokens: int
    mixed: bool


class CoreWaves:
    """One of ``count`` cores.

    most: gives all cores the largest of their numbers at each place; raises RuntimeError where a core is gone.
    place: a word that only these cores know.
    joined: the context to leave at the end.

    running: whether a wave is under way.
    quiet: this core sleeps: requests that wait here are no work, and begin no wave.

    Every core makes its own at the same time.
    """

    def __init__(
        self,
        rank: int,
        count: int,
        most: Callable[[list[int]], list[int]],
        place: str,
        joined: contextlib.ExitStack,
    ) -> None:
        self._count, self._most, self._joined = count, most, joined
        self.running, self.quiet, self._wave = False, False, 0
        self._bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._bell.bind(self._name(place, rank))
        self._bell.setblocking(False)
        self._others = [self._name(place, other) for other in range(count) if other != rank]
        self._pids = most([os.getpid() * (other == rank) for other in range(count)])  # and now all bells are there
        self._lives = {os.pidfd_open(pid): other for other, pid in enumerate(self._pids) if other != rank}

    @staticmethod
    def _name(place: str, rank: int) -> str:
        word = hashlib.sha256(place.encode()).hexdigest()[:32]  # names may not be long
        return f"\0graphllm-{word}-{rank}"  # in no folder, and gone with the process

    @property
    def bell(self) -> int:
        """A file descriptor that can be read once another core has begun a wave."""
        return self._bell.fileno()

    def begin(self) -> None:
        """There is work here: have all cores step."""
        self.hear()
        if self.running or self.quiet:
            return
        self.running, self._wave = True, self._wave + 1
        for other in self._others:
            # A bell with a full buffer holds words of this wave: words of earlier waves were taken out at its steps.
            with contextlib.suppress(BlockingIOError):
                try:
                    self._bell.sendto(b"%d" % self._wave, other)
                except ConnectionError as failure:
                    raise self._blame(failure) from failure

    def hear(self) -> None:
        """Join a wave that another core has begun. What is left of others is of those that have ended."""
        with contextlib.suppress(BlockingIOError):
            while True:
                wave = int(self._bell.recv(64))
                if wave > self._wave:
                    self.running, self._wave = True, wave

    def agree(self, tokens: int, mixed: bool, busy: bool) -> Agreement:
        """Agree with all cores on the next step.

        tokens: of this core.
        busy: it has requests.

        Raises PeerError.
        """
        with self.watched():
            largest, any_mixed, any_busy = self._most([tokens, mixed, busy and not self.quiet])
        self.running = bool(any_busy)
        self.hear()
        return Agreement(largest, bool(any_mixed))

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Raise PeerError for failures in the block that happen because a core is gone."""
        try:
            yield
        except PeerError:
            raise
        except RuntimeError as failure:
            raise self._blame(failure) from failure

    def explain(self, failure: RuntimeError) -> Exception:
        """PeerError for what has failed because a core is gone."""
        return failure if isinstance(failure, PeerError) else self._blame(failure)

    def check(self) -> None:
        """Raise PeerError when a core is gone."""
        if gone := self._gone(0):
            raise self._error(gone)

    def _blame(self, failure: Exception) -> Exception:
        gone = self._gone(_SOON)
        return self._error(gone) if gone else failure

    def _error(self, gone: list[int]) -> PeerError:
        rank = gone[0]
        return PeerError(
            f"engine core {rank} of {self._count} (process {self._pids[rank]}) is gone, and with it the experts that "
            "only it has; start the engine again"
        )

    def _gone(self, seconds: float) -> list[int]:
        poll = select.poll()
        for life in self._lives:
            poll.register(life, select.POLLIN)
        deadline = time.monotonic() + seconds
        while True:
            found = sorted(self._lives[fd] for fd, _ in poll.poll(50 if seconds else 0))
            if found or time.monotonic() >= deadline:
                return found

    def close(self) -> None:
        """Leave the others."""
        self._bell.close()
        for life in self._lives:
            os.close(life)
        self._lives = {}
        self._joined.close()
