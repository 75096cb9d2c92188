"""Messages over TCP between rank 0's process and the processes that lead other hosts' ranks: msgpack, each message
after its length. After Begin a node gets only ranks' commands, encoded as on one host."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Any

import msgspec

from graphllm.runtime.ranks.rank_process import receive


class Hello(msgspec.Struct, tag=True):
    """A node is there.

    number: which one, None for any.
    secret: that it belongs to the engine.
    host: its name.
    """

    number: int | None
    secret: str
    host: str


class Begin(msgspec.Struct, tag=True):
    """The node's part of the engine.

    first, count: its ranks are first, first + 1, ...
    degree: ranks in all.
    store: host and port where ranks meet.
    load: what to load.
    manifest: SHA-256 of the artifact's manifest.json.
    """

    node: int
    first: int
    count: int
    degree: int
    store: str
    load: dict[str, Any]
    manifest: str


class Lacking(msgspec.Struct, tag=True):
    """The node does not have the artifact."""


class Artifact(msgspec.Struct, tag=True):
    """All its files, by their path in its folder."""

    files: dict[str, bytes]


class Said(msgspec.Struct, tag=True):
    """A rank's report, as encoded."""

    rank: int
    report: bytes


class Words(msgspec.Struct, tag=True):
    """Words that ranks have written, as (rank, at, value): a sign of life, if empty."""

    words: list[tuple[int, int, int]]


class Gone(msgspec.Struct, tag=True):
    """One of the node's ranks is gone, and the others with it. config: the settings are at fault."""

    error: str
    config: bool


FromNode = Hello | Lacking | Said | Words | Gone
ToNode = Begin | Artifact


class Connection:
    """Between the two. Several threads may send, one reads."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.settimeout(None)
        self._socket, self._encode = connected, msgspec.msgpack.Encoder().encode
        self._one = threading.Lock()

    def send(self, message: msgspec.Struct) -> None:
        """Raises OSError where nobody is there any more."""
        self.send_encoded(self._encode(message))

    def send_encoded(self, data: bytes) -> None:
        """The same, of a message as bytes."""
        with self._one:
            self._socket.sendall(len(data).to_bytes(8, "little") + data)

    def receive(self) -> bytes | None:
        """The next message, None when there is none any more."""
        try:
            return receive(self._socket.fileno())
        except OSError:  # reset by the other side, or closed here
            return None

    def wait_at_most(self, seconds: float) -> None:
        """Receiving ends where nothing comes in that time; sending where nothing is taken in twice the time."""
        with contextlib.suppress(OSError):  # it is over
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), 0))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * seconds))

    def end_sending(self) -> None:
        """Say that nothing more will be sent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """End the connection; threads that wait to send or to receive notice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """After `end`, when no thread uses it any more."""
        self._socket.close()
