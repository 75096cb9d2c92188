"""The program of a front: an HTTP server in a process of its own. Its connections come from the controller.

It reads its settings as one line of JSON from stdin and lives for as long as that pipe does.
"""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import socket
import ssl
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from graphllm.entrypoints.tracing import Tracing
from graphllm.server.process.fronts.follower import EngineFollower
from graphllm.server.process.fronts.link import ControlLink
from graphllm.server.process.fronts.messages import (
    CONNECTIONS,
    AbortRequests,
    EndResponse,
    FrontLaunch,
    GetReport,
    Joined,
    OfController,
    Report,
)
from graphllm.server.process.fronts.remote import remote
from graphllm.server.process.network import prepare_process, read_tls
from graphllm.server.process.web import WebServer, service_of, web_server
from graphllm.server.service.generation import Running
from graphllm.server.service.stored_responses import Writers
from graphllm.server.supervision.logs import start_log
from graphllm.server.supervision.metrics import Metrics

_AT_ONCE = 64  # connections that are taken before others get a turn
_TICK = 0.25  # seconds between two looks at this process's part of the engine


class Doorway:
    """The socket by which connections come, as file descriptors, and on which the controller hears of their number."""

    def __init__(self, descriptor: int, server: WebServer, tls: ssl.SSLContext | None) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        self._server, self._tls = server, tls
        self._entering: set[asyncio.Task[None]] = set()
        self._taken, self._open = 0, set[int]()  # numbers of connections
        asyncio.get_running_loop().add_reader(self._socket, self._enter)

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket)
            asyncio.get_running_loop().remove_writer(self._socket)
            self._socket.close()

    def _enter(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                data, found, _, _ = socket.recv_fds(self._socket, 1, 1)
            except BlockingIOError:
                break
            if not data:  # the controller is gone, and this process is about to
                self.close()
                return
            for descriptor in found:
                self._taken += 1
                self._open.add(self._taken)
                task = asyncio.create_task(self._serve(socket.socket(fileno=descriptor), self._taken))
                self._entering.add(task)
                task.add_done_callback(self._entering.discard)
        self._tell()  # from now on they are lost with this process

    async def _serve(self, connection: socket.socket, number: int) -> None:
        connection.setblocking(False)
        loop, protocol = asyncio.get_running_loop(), partial(self._server.protocol, partial(self._end, number))
        try:
            await loop.connect_accepted_socket(protocol, connection, ssl=self._tls)
        except OSError:  # it has left already, or does not speak TLS
            connection.close()
            self._end(number)

    def _end(self, number: int) -> None:
        self._open.discard(number)
        self._tell()

    def _tell(self) -> None:
        if self._socket.fileno() < 0:  # closed before the last connections
            return
        loop = asyncio.get_running_loop()
        try:
            self._socket.send(CONNECTIONS.pack(self._taken, len(self._open)))
            loop.remove_writer(self._socket)
        except BlockingIOError:  # the controller is busy
            loop.add_writer(self._socket, self._tell)
        except OSError:  # it is gone, and this process is about to
            self.close()


async def _run(launch: FrontLaunch) -> int:
    loop, options = asyncio.get_running_loop(), launch.options
    for number in (signal.SIGTERM, signal.SIGINT):  # of a whole group of processes: the controller says when to end
        loop.add_signal_handler(number, lambda: None)
    tls, tracing = read_tls(options.config.listen), Tracing(options.traces) if options.traces else None
    link, writers, running = ControlLink(launch.name, launch.folder), Writers(), Running()
    metrics = Metrics(options.names[0])
    follower = EngineFollower(
        options=launch.engine,
        name=launch.name,
        number=launch.number,
        fronts=options.config.serving.api_server_count,
        joined=lambda folders: link.tell(Joined(folders)),
    )
    shared = remote(link, follower, writers, options.config.access.rate_limit_token is not None)
    service = service_of(follower, options.names, metrics, running, shared, options, tracing)
    server = web_server([service], metrics, options, tls)
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
        gc.freeze()  # as in `graphllm.server.process.launch`
        while not follower.broken.is_set():
            await asyncio.sleep(_TICK)
            follower.look()

    doorway = Doorway(launch.doorway, server, tls)
    listening = asyncio.create_task(link.run(follower.follow, asked))
    watching = [asyncio.create_task(watch()), asyncio.create_task(follower.broken.wait())]
    await asyncio.wait({listening, *watching}, return_when=asyncio.FIRST_COMPLETED)
    doorway.close()
    follower.leave()
    server.should_exit = True
    await web
    if tracing is not None:
        tracing.close()
    for task in watching:
        task.cancel()
    if listening.done():
        listening.result()
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
            sys.exit("graphllm.server.process.fronts.front: no settings on stdin; `graphllm serve` starts it")
        line += piece
    launch = msgspec.json.decode(line, type=FrontLaunch, dec_hook=_path)
    threading.Thread(target=_end_with_parent, args=(launch.folder,), daemon=True).start()
    start_log(launch.options.config.log, launch.name)
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
