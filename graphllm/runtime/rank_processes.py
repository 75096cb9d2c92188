"""The processes of ranks 1, 2 ... as that of rank 0 sees them: their start, what they are told, life, death and end.

A thread watches them. One that ends, or gives no sign of life, ends all of them: the ranks wait for each other in every
layer, so none can go on alone. Whoever waits for their work is told by `RankError` which one it was.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from graphllm.config import ConfigError
from graphllm.runtime.broadcast import Writer
from graphllm.runtime.rank_messages import Command, Failed, Report, Stop
from graphllm.runtime.rank_process import LIFE, Settings, receive

_TICK = 0.25  # seconds between two looks at the signs of life
_SILENCE = 5.0  # seconds without one until a rank counts as dead
_IDLE = 60.0  # seconds in which a rank takes none of the commands that it has
_NOTICE = 2.0  # seconds in which the death of a rank is noticed after rank 0 has felt it
_HUNG = 8.0  # seconds without interest in the death of a rank
_GRACE = 5.0  # seconds that an orderly end may take

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class RankError(RuntimeError):
    """A rank is gone, and the others with it."""


class _Life:
    """How long a rank has been quiet, in ticks of the watching thread, so that one that was held up accuses nobody."""

    def __init__(self) -> None:
        self.beat, self.read = 0, 0
        self.silent = self.idle = 0.0


class WaitingRanks:
    """Processes of ranks 1 to ``degree`` - 1, which import what they need while they wait to be told what to load.
    command: of a program that calls `rank_process.run_rank`."""

    def __init__(self, command: Sequence[str], degree: int) -> None:
        self.degree, self.started = degree, time.monotonic()
        self.writer = Writer(degree - 1)
        self.processes = [
            subprocess.Popen(
                [*command, str(self.writer.fd)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(self.writer.fd,),
                start_new_session=True,  # Ctrl-C is for the process of rank 0
            )
            for _ in range(1, degree)
        ]

    def close(self) -> None:
        """Nobody needs them."""
        for process in self.processes:
            process.kill()
            process.communicate()
        self.writer.close()


class RankProcesses:
    """The ranks that waited, now at work. folder: of theirs alone. load: what to load. exits: this process ends when
    nobody asks after the death of one how they are, as the thread that would ask hangs in what it waits for. Close it
    in the end."""

    def __init__(self, waiting: WaitingRanks, folder: str, load: Mapping[str, Any], exits: bool = False) -> None:
        self.degree, self._exits = waiting.degree, exits
        self._writer, self._processes = waiting.writer, waiting.processes
        self._encode = msgspec.msgpack.Encoder().encode
        self._failure: RankError | ConfigError | None = None
        self._failed, self._closing = threading.Event(), threading.Event()
        self._stopping = False
        self._told = threading.Event()  # somebody knows of the failure
        self._reports: list[queue.SimpleQueue[Report | None]] = [queue.SimpleQueue() for _ in self._processes]
        for rank, process in enumerate(self._processes, 1):
            settings = Settings(rank, self.degree, folder, dict(load), waiting.started)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it is dead already, which `_watch` reports
                process.stdin.write(msgspec.json.encode(settings) + b"\n")
                process.stdin.flush()
        self._thread = threading.Thread(target=self._watch, name="graphllm-ranks", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """Of the processes, by rank."""
        return [process.pid for process in self._processes]

    @property
    def failed(self) -> bool:
        """Whether a rank is gone."""
        return self._failed.is_set()

    def send(self, command: Command) -> None:
        """Have all ranks do something; returns at once. Raises RankError."""
        self._writer.write(self._encode(command), self.check)

    def check(self) -> None:
        """Raise RankError, or ConfigError where a rank could not be loaded, when one is gone."""
        if self._failure is not None and self._failed.is_set():
            self._told.set()
            raise type(self._failure)(str(self._failure))

    def check_soon(self) -> None:
        """The same, with the time that it takes to notice."""
        self._failed.wait(_NOTICE)
        self.check()

    def answers(self, kind: type[_T]) -> list[_T]:
        """The next report of every rank, in their order. Raises as `check` does."""
        found = []
        for rank, reports in enumerate(self._reports, 1):
            report = reports.get()
            if report is None:
                self.check_soon()
            assert isinstance(report, kind), f"rank {rank} said {report}"
            found.append(report)
        return found

    def word(self, rank: int, at: int) -> int:
        """A word that a rank has written for rank 0."""
        return self._writer.words(rank - 1)[at]

    def stop(self) -> None:
        """Have the ranks finish what they were told, and end; `close` waits for that."""
        self._closing.set()
        self.send(Stop())
        self._stopping = True

    def close(self) -> None:
        """End the processes, in good order after `stop`. May be called again."""
        if not self._processes:
            return
        self._closing.set()
        self._told.set()
        if self._stopping:
            self._wait()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()  # one that lives ends by this
        self._wait()
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        if self._thread is not threading.current_thread():
            self._thread.join()
        for process in self._processes:
            assert process.stdout is not None
            process.stdout.close()
        self._processes = []
        self._writer.close()

    def _wait(self) -> None:
        """For the end of all, not for long."""
        deadline = time.monotonic() + _GRACE
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def _watch(self) -> None:
        """Take in what ranks report, and notice their end. The thread's whole life."""
        poll = select.poll()
        ranks = {}
        for rank, process in enumerate(self._processes, 1):
            assert process.stdout is not None
            ranks[process.stdout.fileno()] = rank
            poll.register(process.stdout, select.POLLIN)
        lives = [_Life() for _ in self._processes]
        decode = msgspec.msgpack.Decoder(Report).decode
        looked = time.monotonic()
        while ranks:
            for fd, _ in poll.poll(1000 * _TICK):
                rank = ranks[fd]
                data = receive(fd)
                if data is None:
                    poll.unregister(fd)
                    del ranks[fd]
                    self._end(rank, None)
                    continue
                report = decode(data)
                if isinstance(report, Failed):
                    self._end(rank, report)
                else:
                    self._reports[rank - 1].put(report)
            if time.monotonic() - looked >= _TICK and not self._closing.is_set():
                looked = time.monotonic()
                for rank, life in enumerate(lives, 1):
                    self._look(rank, life)

    def _look(self, rank: int, life: _Life) -> None:
        beat, read = self.word(rank, LIFE), self.word(rank, 0)
        life.silent = life.silent + _TICK if beat == life.beat and beat else 0.0  # none before it serves
        life.idle = life.idle + _TICK if read == life.read and read < self._writer.written and beat else 0.0
        life.beat, life.read = beat, read
        if life.silent > _SILENCE:
            self._fail(RankError(f"{self._name(rank)} has given no sign of life for {_SILENCE:.0f} seconds"))
        elif life.idle > _IDLE:
            self._fail(RankError(f"{self._name(rank)} has taken no command for {_IDLE:.0f} seconds"))

    def _end(self, rank: int, report: Failed | None) -> None:
        if report is not None and report.config:
            self._fail(ConfigError(f"{self._name(rank)}: {report.error}"))
            return
        if report is not None:
            # It may have failed because another one was killed, which is what to tell.
            time.sleep(_TICK)
            killed = [r for r, p in enumerate(self._processes, 1) if (p.poll() or 0) < 0]
            if not killed:
                self._fail(RankError(f"{self._name(rank)}: {report.error}"))
                return
            rank = killed[0]
        if self._closing.is_set() or self._failed.is_set():
            return
        try:
            code = self._processes[rank - 1].wait(_GRACE)
        except subprocess.TimeoutExpired:
            how = "has closed its pipe"
        else:
            how = f"exited with code {code}" if code >= 0 else f"was killed by signal {-code} ({_signal(-code)})"
        self._fail(RankError(f"{self._name(rank)} {how}"))

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {self.degree} (process {self._processes[rank - 1].pid})"

    def _fail(self, failure: RankError | ConfigError) -> None:
        """The first one counts. The other ranks end, whatever they do; so what waits for them ends too."""
        if self._failed.is_set():
            return
        self._failure = failure
        self._failed.set()
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for reports in self._reports:
            reports.put(None)
        if self._exits and not self._told.wait(_HUNG):
            _log.error("%s; the engine core hangs and ends", failure)
            os._exit(1)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
