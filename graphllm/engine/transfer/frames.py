"""What two engines say to each other over a socket: frames of msgpack, none of them with contents of the cache."""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

VERSION = 2
MOST = 64 << 20  # bytes of a frame
FIRST = 64 << 10  # bytes of a frame of an engine that has not said yet who it is
_LENGTH = struct.Struct("<I")


class Challenge(msgspec.Struct, tag=True, array_like=True):
    """The first word of the engine that was called. nonce: random bytes, which the other one's proof has in it."""

    nonce: bytes


class Hello(msgspec.Struct, tag=True, array_like=True):
    """The answer of an engine that comes.

    version: of this protocol.
    identity: of the model and its blocks.
    ranks: of the engine.
    engine: the id of the engine that it wants.
    nonce: random bytes, which the other engine's proof has in it.
    proof: that it knows the secret.
    """

    version: int
    identity: str
    ranks: int
    engine: str
    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, tag=True, array_like=True):
    """The answer to that.

    proof: that this engine knows the secret, too.
    ranks: what its ranks say of themselves. Descriptors of the ``files`` of all ranks come with it, in their order.
    """

    proof: bytes
    ranks: list[dict[str, Any]]


class Refused(msgspec.Struct, tag=True, array_like=True):
    """The answer to an engine that cannot use the contents; the connection ends."""

    message: str


class Find(msgspec.Struct, tag=True, array_like=True):
    """Which of these contents are there? request: whose contents are waited for for a while; "": of none."""

    request: str
    keys: list[tuple[int, bytes]]


class Found(msgspec.Struct, tag=True, array_like=True):
    """entries: of the keys, -1 for none. known: the request is kept, so its contents are for the asker."""

    entries: list[int]
    known: bool


class Check(msgspec.Struct, tag=True, array_like=True):
    """Are the contents still there that were found? It is asked when they have been copied."""


class Lost(msgspec.Struct, tag=True, array_like=True):
    """at: which of the keys of `Find` are there no more; what was copied of them is of no use."""

    at: list[int]


Asked = Hello | Find | Check
Answer = Challenge | Welcome | Refused | Found | Lost
_encode = msgspec.msgpack.Encoder().encode
_asked, _answer = msgspec.msgpack.Decoder(Asked), msgspec.msgpack.Decoder(Answer)


class Frames:
    """One side of a connection. Every method raises OSError when the other side is gone, or silent for too long.

    most: bytes of a frame that is read.
    """

    def __init__(self, connection: socket.socket, most: int = MOST) -> None:
        self.connection, self.most = connection, most

    def send(self, message: msgspec.Struct, descriptors: list[int] | None = None) -> None:
        """Send a message, with descriptors of files."""
        data = _encode(message)
        frame = _LENGTH.pack(len(data)) + data
        if descriptors:
            sent = socket.send_fds(self.connection, [frame], descriptors)
            frame = frame[sent:]
        self.connection.sendall(frame)

    def asked(self) -> Any:
        """The next message of an engine that came."""
        return self._read(_asked)

    def answer(self, descriptors: list[int] | None = None, count: int = 0) -> Any:
        """The next answer. descriptors: up to ``count`` that come with it are added here; the caller closes them."""
        return self._read(_answer, descriptors, count)

    def _read(self, decoder: Any, descriptors: list[int] | None = None, count: int = 0) -> Any:
        if descriptors is None:
            first = self.connection.recv(_LENGTH.size)
        else:
            first, found, _, _ = socket.recv_fds(self.connection, _LENGTH.size, count)
            descriptors += found
        (length,) = _LENGTH.unpack(first + self._exactly(_LENGTH.size - len(first)) if first else self._exactly(4))
        if length > self.most:
            raise ConnectionError(f"a frame of {length} bytes")
        try:
            return decoder.decode(self._exactly(length))
        except msgspec.MsgspecError as damage:
            raise ConnectionError(f"no message of this version: {damage}") from damage

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = self.connection.recv(count - len(data))
            if not piece:
                raise ConnectionError("the other engine has closed the connection")
            data += piece
        return bytes(data)

    def close(self) -> None:
        """End the connection."""
        self.connection.close()
