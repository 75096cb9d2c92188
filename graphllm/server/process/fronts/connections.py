"""How a controller hands connections to its fronts."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable

from graphllm.server.process.fronts.front_process import FrontProcess
from graphllm.server.process.fronts.messages import CONNECTIONS

_log = logging.getLogger(__name__)
_AT_ONCE = 64  # connections that are handed out before others get a turn
_PAUSE = 0.02  # seconds in which nobody can take a connection


class Connections:
    """Accepts connections; each goes to the front that has the fewest.

    fronts: by name. The front that got the latest connection is moved to the end.
    later: calls a function after some seconds, unless the server ends before.
    stopping: no more connections are accepted.
    """

    def __init__(
        self,
        fronts: dict[bytes, FrontProcess],
        later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self._fronts, self._later = fronts, later
        self.stopping = False

    def listen(self, listener: socket.socket) -> None:
        """Accept connections of this socket, once `look` finds a front for them."""
        self._listener = listener
        listener.setblocking(False)

    def look(self) -> None:
        """Accept connections if some front takes them; else they wait in the kernel."""
        if not self.stopping and any(front.joined is not None for front in self._fronts.values()):
            asyncio.get_running_loop().add_reader(self._listener, self._hand_out)
        else:
            self.close()

    def close(self) -> None:
        """Accept no connections until the next `look`."""
        asyncio.get_running_loop().remove_reader(self._listener)

    def _hand_out(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as problem:
                _log.error("no connection can be taken: %s", problem)
                self._pause(1.0)
                return
            if not self._hand(connection):
                return

    def _hand(self, connection: socket.socket) -> bool:
        """Give a connection to the front that has the fewest, in turn among equals; False where it must wait."""
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        there = [front for front in self._fronts.values() if front.joined is not None]
        for front in sorted(there, key=lambda front: front.load):
            try:
                socket.send_fds(front.doorway, [b"c"], [connection.fileno()])
            except OSError:  # it is full, or gone
                continue
            name = front.name.encode()
            self._fronts[name] = self._fronts.pop(name)  # the last one now
            front.handed.append((connection, time.monotonic()))
            return True
        self.close()

        def again() -> None:
            if self._hand(connection):
                self.look()

        self._later(_PAUSE, again)
        return False

    def taken(self, front: FrontProcess) -> None:
        """A front says how many connections it has; or its end has closed its side."""
        try:
            while said := front.doorway.recv(CONNECTIONS.size):
                taken, front.open = CONNECTIONS.unpack(said)
                for _ in range(taken - front.taken):
                    front.handed.popleft()[0].close()
                front.taken = taken
        except BlockingIOError:
            return
        except OSError:  # it was closed, with connections still in it
            pass
        self.shut(front)

    def shut(self, front: FrontProcess) -> None:
        """It takes no more connections; nothing was read yet of those that it has not taken, so others have them."""
        asyncio.get_running_loop().remove_reader(front.doorway)
        front.joined = None
        while front.handed:
            self._hand(front.handed.popleft()[0])
        self.look()

    def _pause(self, seconds: float) -> None:
        self.close()
        self._later(seconds, self.look)
