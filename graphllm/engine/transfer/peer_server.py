"""PeerServer: tells other engines of this host what they may copy from this one's memory."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

from graphllm.engine.transfer.frames import VERSION, Check, Find, Found, Frames, Hello, Lost, Refused, Welcome
from graphllm.engine.transfer.shared_entries import Lease, SharedEntries

_SILENT = 30.0  # seconds after which an engine that says nothing is not waited for
_CREDENTIALS = struct.Struct("3i")


class PeerServer:
    """A thread that listens, and one for each connection, of which an engine has one for each request.

    listener: socket, at ``path``.
    own: what this engine would say of itself.
    shapes, descriptors: of the memory of all ranks, in their order; see `frames.Welcome`.
    entries: what there is.
    patience: seconds that another engine waits for contents that are on their way to host memory.
    """

    def __init__(
        self, listener: socket.socket, path: Path, own: Hello, shapes: list[dict[str, list[int]]],
        descriptors: Sequence[int], entries: SharedEntries, patience: float,
    ) -> None:  # fmt: skip
        self._listener, self._path, self._own, self._entries = listener, path, own, entries
        self._shapes, self._descriptors, self._patience = shapes, list(descriptors), patience
        self._open = set[socket.socket]()
        self._thread = threading.Thread(target=self._listen, name="peer-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Serve nobody any more."""
        self._path.unlink(missing_ok=True)
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
            _, user, _ = _CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            connection.settimeout(_SILENT)
            frames = Frames(connection)
            if user != os.getuid() or not self._greet(frames):
                return
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
        said, own = frames.asked(), self._own
        if not isinstance(said, Hello):
            return False
        why = (
            "it speaks another version of this protocol"
            if said.version != VERSION
            else "it runs another model, or one of another dtype, layout or block size"
            if said.identity != own.identity
            else f"its engine has {own.ranks} ranks"
            if said.ranks != own.ranks
            else "it has another cache_secret; give the same to both"
            if said.secret != own.secret
            else ""
        )
        if why:
            frames.send(Refused(why))
            return False
        frames.send(Welcome(self._shapes), self._descriptors)
        return True
