"""The program of a front: an HTTP server whose connections come from the controller, in a process of its own.

It reads its settings as one line of JSON from stdin and lives for as long as that pipe does.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import signal
import socket
import ssl
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from graphllm.entrypoints.tracing import Tracing
from graphllm.server.fronts.follower import EngineFollower
from graphllm.server.fronts.link import ControlLink
from graphllm.server.fronts.messages import (
    AbortRequests,
    EndResponse,
    FrontLaunch,
    GetReport,
    Joined,
    OfController,
    Report,
)
from graphllm.server.fronts.remote import remote
from graphllm.server.generation import Running
from graphllm.server.network import prepare_process, read_tls
from graphllm.server.operations.logs import start_log
from graphllm.server.operations.metrics import Metrics
from graphllm.server.responses.store import Writers
from graphllm.server.web import WebServer, web_server

_AT_ONCE = 64  # connections that are taken before others get a turn
_TICK = 0.25  # seconds between two looks at this process's part of the engine


class Doorway:
    """The socket by which connections come, as file descriptors."""

    def __init__(self, descriptor: int, server: WebServer, tls: ssl.SSLContext | None) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        self._server, self._tls = server, tls
        self._entering: set[asyncio.Task[None]] = set()
        asyncio.get_running_loop().add_reader(self._socket, self._enter)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _enter(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                data, found, _, _ = socket.recv_fds(self._socket, 1, 1)
            except BlockingIOError:
                return
            if not data:  # the controller is gone, and this process is about to
                self.close()
                return
            with contextlib.suppress(OSError):
                self._socket.send(b"t")  # from now on it is lost with this process
            for descriptor in found:
                task = asyncio.create_task(self._serve(socket.socket(fileno=descriptor)))
                self._entering.add(task)
                task.add_done_callback(self._entering.discard)

    async def _serve(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._server.protocol, connection, ssl=self._tls)
        except OSError:  # it has left already, or does not speak TLS
            connection.close()


async def _run(launch: FrontLaunch) -> int:
    loop, options = asyncio.get_running_loop(), launch.options
    for number in (signal.SIGTERM, signal.SIGINT):  # of a whole group of processes: the controller says when to end
        loop.add_signal_handler(number, lambda: None)
    tls, tracing = read_tls(options), Tracing(options.traces) if options.traces else None
    link, writers, running = ControlLink(launch.name, launch.folder), Writers(), Running()
    metrics = Metrics(options.names[0])
    follower = EngineFollower(
        options=launch.engine,
        name=launch.name,
        number=launch.number,
        fronts=options.fronts,
        joined=lambda core: link.tell(Joined(core)),
    )
    shared = remote(link, follower, writers, options.access.rate is not None)
    server = web_server(follower, metrics, running, shared, options, tls, tracing)
    web = asyncio.create_task(server.serve([]))
    while not server.started:
        await asyncio.sleep(0)

    async def asked(question: OfController) -> Any:
        match question:
            case GetReport():
                return Report(metrics.counted(), follower.running, metrics.in_flight)
            case EndResponse(id):
                await writers.end(id)
            case AbortRequests(names):
                ids = running.of(names)
                if ids:
                    await follower.engine.abort(ids)
                return len(ids)
        return None

    async def watch() -> None:
        await follower.was_ready.wait()
        gc.collect()
        gc.freeze()  # as in `graphllm.server.launch`
        while not follower.broken.is_set():
            await asyncio.sleep(_TICK)
            follower.look()

    doorway = Doorway(launch.doorway, server, tls)
    told = asyncio.create_task(link.run(follower.told, asked))
    watching = [asyncio.create_task(watch()), asyncio.create_task(follower.broken.wait())]
    await asyncio.wait({told, *watching}, return_when=asyncio.FIRST_COMPLETED)
    doorway.close()
    follower.leave()
    server.should_exit = True
    await web
    if tracing is not None:
        tracing.close()
    for task in watching:
        task.cancel()
    if told.done():
        told.result()
        link.close()
    return int(follower.broken.is_set())


def _end_with_parent(folder: str) -> None:
    while os.read(0, 1024):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main() -> None:
    """Read the settings, serve until the controller says otherwise."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1 << 16)
        if not piece:
            sys.exit("graphllm.server.fronts.front: no settings on stdin; it is started by graphllm serve, not by hand")
        line += piece
    launch = msgspec.json.decode(line, type=FrontLaunch, dec_hook=_path)
    threading.Thread(target=_end_with_parent, args=(launch.folder,), daemon=True).start()
    start_log(launch.options.log, launch.name)
    prepare_process()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(_run(launch))
    sys.exit(status)


def _path(kind: type, value: Any) -> Any:
    if kind is not Path:
        raise NotImplementedError(kind)
    return Path(value)


if __name__ == "__main__":
    main()
