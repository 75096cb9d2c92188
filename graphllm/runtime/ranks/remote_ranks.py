"""Ranks on other hosts, as rank 0's process sees them: nodes that connect to an address. A process on each node leads
its ranks (`graphllm.runtime.ranks.node`)."""

from __future__ import annotations

import hmac
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from graphllm.config import ConfigError
from graphllm.runtime.ranks.node_messages import (
    Artifact,
    Begin,
    Connection,
    FromNode,
    Gone,
    Hello,
    Lacking,
    Said,
    Words,
)
from graphllm.runtime.ranks.rank_failure import RankError, SharedFate
from graphllm.runtime.ranks.rank_messages import Report
from graphllm.runtime.ranks.rank_processes import Hear

_SILENCE = 5.0  # seconds without a sign of life until a node counts as dead that has given them in time
_OFTEN, _MOST = 5, 60.0  # of a node that was late: times its longest recent pause, and at most this many seconds
_GREETING = 10.0  # seconds that whoever connects may take to say who it is
_PATIENCE = 600.0  # seconds for all nodes to come
_REMINDER = 20.0  # seconds between two lines of the log while some are waited for
_GRACE = 5.0  # seconds that an orderly end may take

_log = logging.getLogger(__name__)


class RemoteRanks:
    """The ranks of one node.

    begin: its first message.
    artifact: the files of the artifact, for a node without it.
    explain: why a node may be gone when its connection ends, where somebody else knows.
    """

    def __init__(
        self,
        begin: Begin,
        artifact: Callable[[], dict[str, bytes]],
        explain: Callable[[int], str],
        fate: SharedFate,
        hear: Hear,
    ) -> None:
        self.numbers = range(begin.first, begin.first + begin.count)
        self.node, self._begin, self._artifact, self._explain = begin.node, begin, artifact, explain
        self._fate, self._hear = fate, hear
        self._connection: Connection | None = None
        self._name = ""
        self._words: dict[tuple[int, int], int] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name=f"graphllm-node-{begin.node}", daemon=True)

    @property
    def here(self) -> bool:
        """Whether the node has come."""
        return self._connection is not None

    def connect(self, connection: Connection, host: str) -> None:
        """The node has come."""
        self._connection, self._name = connection, f"node {self.node} ({host})"
        self._fate.ends(connection.end)
        connection.send(self._begin)
        self._thread.start()

    def write(self, command: bytes) -> None:
        """Have its ranks do something. Raises RankError."""
        assert self._connection is not None
        try:
            self._connection.send_encoded(command)
        except OSError:
            self._fate.check_soon()
            raise

    def word(self, rank: int, at: int) -> int:
        """A word that a rank has written, as last heard."""
        return self._words.get((rank, at), 0)

    def stop(self, command: bytes) -> None:
        """Send the command to stop; the node ends after it."""
        self._closing.set()
        self.write(command)

    def close(self) -> None:
        """End the connection, and with it the node's ranks; after `stop` once they have ended."""
        if self._connection is None:
            return
        if self._closing.is_set() and not self._fate.failed:
            self._thread.join(_GRACE)
        self._closing.set()
        self._connection.end()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._connection.close()

    def _listen(self) -> None:
        """The thread's whole life."""
        try:
            self._take_in()
        except Exception as failure:
            self._fate.fail(RankError(f"{self._name}: {type(failure).__name__}: {failure}"))

    def _take_in(self) -> None:
        """What the node says, until its connection ends."""
        assert self._connection is not None
        decode = msgspec.msgpack.Decoder(FromNode).decode
        decode_report = msgspec.msgpack.Decoder(Report).decode
        patience = Patience()
        while True:
            begun = time.monotonic()
            data = self._connection.receive()
            silent = time.monotonic() - begun
            if data is None:
                break
            if patience.heard(silent):
                self._connection.wait_at_most(patience.seconds)
            match decode(data):
                case Said(rank, report):
                    self._hear(rank, decode_report(report))
                case Words(words):
                    self._words.update({(rank, at): value for rank, at, value in words})
                case Lacking():
                    self._connection.send(Artifact(self._artifact()))
                case Gone(error, config):
                    message = f"{self._name}: {error}"
                    self._fate.fail(ConfigError(message) if config else RankError(message))
                    return
        if self._closing.is_set() or self._fate.failed:
            return
        if silent >= patience.seconds:
            self._fate.fail(RankError(f"{self._name} has given no sign of life for {patience.seconds:.0f} seconds"))
        else:
            self._fate.fail(RankError(f"{self._name} is gone: its connection has ended{self._explain(self.node)}"))


class Patience:
    """How many seconds to wait for the next sign of life of a node. Nobody here sees whether it could give one, but one
    that is starved of the processor gives them late before it gives none for long."""

    def __init__(self) -> None:
        self.seconds, self._longest = _SILENCE, 0.0

    def heard(self, pause: float) -> bool:
        """A sign of life came after ``pause`` seconds. Returns whether that changes the patience."""
        self._longest = max(pause, self._longest - pause / _OFTEN)  # forgotten after as long as the patience was
        seconds = min(_MOST, max(_SILENCE, float(math.ceil(_OFTEN * self._longest))))
        changed, self.seconds = seconds != self.seconds, seconds
        return changed


class NodesDoor(NamedTuple):
    """Where nodes come to: a listening socket, and the secret that they say."""

    socket: socket.socket
    secret: str

    @property
    def address(self) -> str:
        return f"{self.socket.getsockname()[0]}:{self.port}"

    @property
    def port(self) -> int:
        return int(self.socket.getsockname()[1])


def listen(host: str, port: int, name: str = "master_port") -> socket.socket:
    """A socket for others to connect to.

    port: 0 for any.
    name: the setting that says it.

    Raises ConfigError.
    """
    try:
        return socket.create_server((host, port))
    except (OSError, OverflowError) as refused:
        raise ConfigError(
            f"{name} is {port}: this process cannot listen on {host}:{port} ({refused}); give an address of this host "
            "and a free port"
        ) from None


def receive_nodes(door: NodesDoor, nodes: Sequence[RemoteRanks], fate: SharedFate) -> threading.Thread:
    """Let nodes come, in a thread; it ends with the door's socket or when all are there."""
    thread = threading.Thread(target=_receive, args=(door, nodes, fate), name="graphllm-nodes", daemon=True)
    thread.start()
    return thread


def _receive(door: NodesDoor, nodes: Sequence[RemoteRanks], fate: SharedFate) -> None:
    begun, reminded = time.monotonic(), 0.0
    door.socket.settimeout(0.5)
    while (missing := [n for n in nodes if not n.here]) and not fate.failed:
        waited = time.monotonic() - begun
        names = " and ".join(f"node {n.node} of {len(nodes) + 1}" for n in missing)
        if waited > _PATIENCE:
            fate.fail(RankError(f"{names} has not come to {door.address} within {_PATIENCE / 60:.0f} minutes"))
            return
        if waited - reminded > _REMINDER:
            reminded = waited
            _log.info("waiting for %s to come to %s", names, door.address)
        try:
            connected, _ = door.socket.accept()
        except TimeoutError:
            continue
        except OSError:  # closed: the engine ends
            return
        _greet(connected, door.secret, missing)


def _greet(connected: socket.socket, secret: str, missing: Sequence[RemoteRanks]) -> None:
    connection = Connection(connected)
    connection.wait_at_most(_GREETING)
    data, why = connection.receive(), "it says nothing that a node says"
    try:
        hello = None if data is None else msgspec.msgpack.decode(data, type=Hello)
    except msgspec.MsgspecError:
        hello = None
    if hello is not None:
        node = next((n for n in missing if hello.number in (None, n.node)), None)
        if not hmac.compare_digest(hello.secret.encode(), secret.encode()):
            why = "it belongs to another engine"
        elif node is None:
            why = f"nobody waits for node {hello.number}: is its node_rank right?"
        else:
            connection.wait_at_most(_SILENCE)
            try:
                node.connect(connection, hello.host)
            except OSError:  # it is gone, which its thread tells
                return
            return
    _log.warning("a connection from %s is refused: %s", connected.getpeername()[0], why)
    connection.end()
    connection.close()
