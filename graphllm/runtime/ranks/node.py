"""A node: a process that leads a host's ranks for rank 0's process. It connects to that process, starts the ranks,
passes on commands and reports, and ends with either side. It computes nothing and imports no torch."""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from graphllm.config import ConfigError
from graphllm.runtime.ranks.node_messages import Artifact, Begin, Connection, Gone, Hello, Lacking, Said, Words
from graphllm.runtime.ranks.rank_failure import RankError, SharedFate
from graphllm.runtime.ranks.rank_messages import Report, Stop
from graphllm.runtime.ranks.rank_process import CHECKS, FIRST_CHECK
from graphllm.runtime.ranks.rank_processes import Orders, RankProcesses, WaitingRanks

_BEAT = 0.25  # seconds between signs of life
_LOST = 10_000  # milliseconds in which the other host takes nothing, until it counts as gone
_STOP = msgspec.msgpack.encode(Stop())

# begin, the artifact's files from rank 0's host, a folder for them -> what the ranks load
Prepare = Callable[[Begin, Callable[[], Mapping[str, bytes]], Path], dict[str, Any]]


def lead_node(
    address: tuple[str, int],
    hello: Hello,
    command: Sequence[str],
    prepare: Prepare,
    environment: Mapping[str, str] | None = None,
) -> bool:
    """Be a node of the engine at that address, until it ends; whether there was one.

    command, environment: of ranks' processes.
    prepare: says what they load, and raises ConfigError for what this host lacks.

    Raises RankError when a rank here, or the engine, is gone, OSError where nobody listens.
    """
    connected = socket.create_connection(address, timeout=10)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST)
    connection = Connection(connected)
    folder = Path(tempfile.mkdtemp(prefix="graphllm-node-"))
    try:
        connection.send(hello)
        begin = connection.receive()
        if begin is None:
            return False
        _Node(connection, folder).live(msgspec.msgpack.decode(begin, type=Begin), command, prepare, environment)
        return True
    finally:
        connection.end()
        connection.close()
        shutil.rmtree(folder, ignore_errors=True)


class _Node:
    def __init__(self, connection: Connection, folder: Path) -> None:
        self._connection, self._folder = connection, folder
        self._fate = SharedFate()
        self._ranks: RankProcesses | None = None
        self._over = threading.Event()
        self._sent: dict[tuple[int, int], int] = {}
        self._telling = threading.Lock()
        self._encode = msgspec.msgpack.Encoder().encode

    def live(
        self, begin: Begin, command: Sequence[str], prepare: Prepare, environment: Mapping[str, str] | None
    ) -> None:
        heart = threading.Thread(target=self._beat, name="graphllm-node-heart", daemon=True)
        heart.start()
        self._fate.ends(self._tell_failure)
        try:
            load = prepare(begin, self._fetch, self._folder)
            orders = Orders(begin.first, begin.degree, str(self._folder), f"tcp://{begin.store}", load)
            waiting = WaitingRanks(command, begin.count, environment)
            self._ranks = RankProcesses(waiting, orders, self._fate, self._hear)
            stopped = self._pass_on(self._ranks)
        except (ConfigError, RankError) as failure:
            self._fate.fail(failure)
            while self._connection.receive() is not None:  # until the failure is known there
                pass
            stopped = False
        finally:
            self._over.set()
            if self._ranks is not None:
                self._ranks.close()
            heart.join()
        self._fate.check()
        if not stopped:
            raise RankError("the engine that this node belonged to is gone")

    def _pass_on(self, ranks: RankProcesses) -> bool:
        """Pass commands on, and what ranks have written since; whether it ends in good order."""
        while (command := self._connection.receive()) is not None:
            if command == _STOP:
                ranks.stop(command)
                return True
            ranks.write(command)
            self._tell_words()
        return False

    def _fetch(self) -> Mapping[str, bytes]:
        self._connection.send(Lacking())
        data = self._connection.receive()
        if data is None:
            raise RankError("the engine that this node belonged to is gone")
        return msgspec.msgpack.decode(data, type=Artifact).files

    def _hear(self, rank: int, report: Report) -> None:
        self._send(Said(rank, self._encode(report)))

    def _tell_words(self) -> None:
        """What ranks say of the steps that they have done."""
        with self._telling:
            found: list[tuple[int, int, int]] = []
            if self._ranks is not None and not self._over.is_set():
                for rank in self._ranks.numbers:
                    for at in range(FIRST_CHECK, FIRST_CHECK + CHECKS):
                        value = self._ranks.word(rank, at)
                        if self._sent.get((rank, at), 0) != value:
                            self._sent[rank, at] = value
                            found.append((rank, at, value))
            self._send(Words(found))

    def _beat(self) -> None:
        while not self._over.wait(_BEAT):
            self._tell_words()

    def _tell_failure(self) -> None:
        try:
            self._fate.check()
        except (ConfigError, RankError) as failure:
            self._send(Gone(str(failure), isinstance(failure, ConfigError)))
            self._connection.end_sending()

    def _send(self, message: msgspec.Struct) -> None:
        try:
            self._connection.send(message)
        except OSError:  # the engine is gone; the reading thread finds out, too
            self._connection.end()
