"""The processes of ranks on this host, as the leading process sees them: start, commands, life, death and end. On rank
0's host it leads ranks 1, 2 ...; on another host `graphllm.runtime.ranks.node` leads that host's ranks.

A thread watches them. One that ends, or gives no sign of life though it could (`silence`), ends all of them
(`rank_failure`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from graphllm.config import ConfigError
from graphllm.host.importing import import_path
from graphllm.host.silence import Silence, threads_of
from graphllm.runtime.ranks.broadcast import Writer
from graphllm.runtime.ranks.rank_failure import RankError, SharedFate
from graphllm.runtime.ranks.rank_messages import Failed, Report
from graphllm.runtime.ranks.rank_process import LIFE, Settings, receive

_TICK = 0.25  # seconds between two looks at the signs of life
_SILENCE = 5.0  # seconds in which a rank could have given one, until it counts as dead
_IDLE = 60.0  # seconds in which a rank could have taken one of the commands that it has, and takes none
_GRACE = 5.0  # seconds that an orderly end may take

Hear = Callable[[int, Report], None]  # what is done with a report of a rank


class _Life:
    """How long a rank has been quiet: without a sign of life, and with commands that it does not read."""

    def __init__(self, pid: int) -> None:
        self.beat, self.read = 0, 0
        self.silence, self.idle = (Silence(lambda: threads_of(pid), _TICK) for _ in range(2))


class WaitingRanks:
    """Processes of ranks that import what they need while they wait for their orders.

    command: of a program that calls `rank_process.run_rank`.
    count: processes.
    environment: variables on top of this process's.
    """

    def __init__(self, command: Sequence[str], count: int, environment: Mapping[str, str] | None = None) -> None:
        self.count, self.started = count, time.monotonic()
        self.writer = Writer(count)
        self.processes = [
            subprocess.Popen(
                [*command, str(self.writer.fd)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(self.writer.fd,),
                env={**os.environ, "PYTHONPATH": import_path(), **(environment or {})},
                start_new_session=True,  # Ctrl-C is for the process of rank 0
            )
            for _ in range(count)
        ]

    def close(self) -> None:
        """Nobody needs them."""
        for process in self.processes:
            process.kill()
            process.communicate()
        self.writer.close()


class Orders(msgspec.Struct):
    """What the ranks of a host get at their start.

    first: the number of the first rank of the host; the others follow.
    degree: ranks in all.
    folder: a folder of their own on their host.
    meeting: where all ranks meet, see `graphllm.runtime.ranks.groups`.
    load: what to load.
    """

    first: int
    degree: int
    folder: str
    meeting: str
    load: dict[str, Any]


class RankProcesses:
    """The ranks that waited, now at work. hear: gets what they report, in a thread. Close it in the end."""

    def __init__(self, waiting: WaitingRanks, orders: Orders, fate: SharedFate, hear: Hear) -> None:
        self.numbers = range(orders.first, orders.first + waiting.count)
        self._degree, self._fate, self._hear = orders.degree, fate, hear
        self._writer, self._processes = waiting.writer, waiting.processes
        self._closing = threading.Event()
        self._stopping = False
        fate.ends(self._kill)
        for reader, process in enumerate(self._processes):
            settings = Settings(
                orders.first + reader,
                orders.degree,
                reader,
                waiting.count,
                orders.folder,
                orders.meeting,
                orders.load,
                waiting.started,
            )
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

    def write(self, command: bytes) -> None:
        """Have all these ranks do something, as encoded; returns at once. Raises RankError."""
        self._writer.write(command, self._fate.check)

    def word(self, rank: int, at: int) -> int:
        """A word that a rank has written."""
        return self._writer.words(rank - self.numbers.start)[at]

    def stop(self, command: bytes) -> None:
        """Send the command to stop. The ranks finish their commands and end; `close` waits for that."""
        self._closing.set()
        self.write(command)
        self._stopping = True

    def close(self) -> None:
        """End the processes, in good order after `stop`. May be called again."""
        if not self._processes:
            return
        self._closing.set()
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
        for rank, process in zip(self.numbers, self._processes, strict=True):
            assert process.stdout is not None
            ranks[process.stdout.fileno()] = rank
            poll.register(process.stdout, select.POLLIN)
        lives = [_Life(process.pid) for process in self._processes]
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
                    self._hear(rank, report)
            if time.monotonic() - looked >= _TICK and not self._closing.is_set():
                looked = time.monotonic()
                for rank, life in zip(self.numbers, lives, strict=True):
                    self._look(rank, life)

    def _look(self, rank: int, life: _Life) -> None:
        beat, read = self.word(rank, LIFE), self.word(rank, 0)
        if beat != life.beat or not beat:  # there is none before it serves
            life.silence.heard()
        if read != life.read or read >= self._writer.written or not beat:
            life.idle.heard()
        life.beat, life.read = beat, read
        if life.silence.look() > _SILENCE:
            self._fate.fail(RankError(f"{self._name(rank)} has given no sign of life for {_SILENCE:.0f} seconds"))
        elif life.idle.look() > _IDLE:
            self._fate.fail(RankError(f"{self._name(rank)} has taken no command for {_IDLE:.0f} seconds"))

    def _end(self, rank: int, report: Failed | None) -> None:
        if report is not None and report.config:
            self._fate.fail(ConfigError(f"{self._name(rank)}: {report.error}"))
            return
        if report is not None:
            # It may have failed because another one was killed, which is what to tell.
            time.sleep(_TICK)
            killed = [r for r, p in zip(self.numbers, self._processes, strict=True) if (p.poll() or 0) < 0]
            if not killed:
                self._fate.fail(RankError(f"{self._name(rank)}: {report.error}"))
                return
            rank = killed[0]
        if self._closing.is_set() or self._fate.failed:
            return
        try:
            code = self._process(rank).wait(_GRACE)
        except subprocess.TimeoutExpired:
            how = "has closed its pipe"
        else:
            how = f"exited with code {code}" if code >= 0 else f"was killed by signal {-code} ({_signal(-code)})"
        self._fate.fail(RankError(f"{self._name(rank)} {how}"))

    def _process(self, rank: int) -> subprocess.Popen[bytes]:
        return self._processes[rank - self.numbers.start]

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {self._degree} (process {self._process(rank).pid})"

    def _kill(self) -> None:
        """The ranks end, whatever they do; so what waits for them ends too."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
