"""PeerServer: tells other engines what they may copy from this one's memory."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

from graphllm.engine.transfer.frames import FIRST, MOST, Check, Find, Found, Frames, Hello, Lost, Refused, Welcome
from graphllm.engine.transfer.peer_identity import Address, PeerIdentity
from graphllm.engine.transfer.shared_entries import Lease, SharedEntries

_SILENT = 30.0  # seconds after which an engine that says nothing is not waited for
_CREDENTIALS = struct.Struct("3i")


class PeerServer:
    """A thread that listens, and one for each connection, of which an engine has one for each request.

    listener: socket of this engine.
    address: by which others call it.
    own: what this engine is.
    ranks: what its ranks say of themselves.
    descriptors: of the files of all ranks, in their order.
    entries: what there is.
    patience: seconds that another engine waits for contents that are on their way to host memory.
    """

    def __init__(
        self, listener: socket.socket, address: Address, own: PeerIdentity, ranks: list[dict[str, Any]],
        descriptors: Sequence[int], entries: SharedEntries, patience: float,
    ) -> None:  # fmt: skip
        self._listener, self._address, self._own, self._entries = listener, address, own, entries
        self._ranks, self._descriptors, self._patience = ranks, list(descriptors), patience
        self._open = set[socket.socket]()
        self._thread = threading.Thread(target=self._listen, name="peer-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Serve nobody any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        self._open.add(connection)
        lease: Lease | None = None
        keys: list[tuple[int, bytes]] = []
        request = ""
        try:
            connection.settimeout(_SILENT)
            frames = Frames(connection, FIRST)
            if not _may_enter(connection) or not self._greet(frames):
                return
            frames.most = MOST
            while True:
                match frames.asked():
                    case Find(id, wanted) if lease is None:
                        request, keys = id, [(group, digest) for group, digest in wanted]
                        lease, entries, known = self._entries.lease(request, keys, self._patience)
                        frames.send(Found(entries, known))
                    case Check() if lease is not None:
                        lost = self._entries.lost(lease)
                        frames.send(Lost([at for at, key in enumerate(keys) if key in lost]))
                    case _:
                        return
        except OSError:  # it is gone; its lease goes with it
            pass
        finally:
            self._open.discard(connection)
            if lease is not None:
                self._entries.end(lease, request)
            connection.close()

    def _greet(self, frames: Frames) -> bool:
        challenge = self._own.challenge()
        frames.send(challenge)
        said = frames.asked()
        if not isinstance(said, Hello):
            return False
        if why := self._own.refusal(challenge, said, self._address):
            frames.send(Refused(why))
            return False
        frames.send(Welcome(self._own.welcome(said, self._address), self._ranks), self._descriptors)
        return True


def _may_enter(connection: socket.socket) -> bool:
    """Whether a process of this host is one of the same user. Over a network the secret says it."""
    if connection.family != socket.AF_UNIX:
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.getuid())
