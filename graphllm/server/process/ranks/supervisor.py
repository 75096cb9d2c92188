"""The supervisor of data parallel ranks: starts a server for each, looks at their health, tells it for all of them."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from graphllm.config.server import ListenConfig
from graphllm.engine.process.placement import cpus_of, gpus_of
from graphllm.host.silence import Silence, threads_of
from graphllm.server.process.network import listening
from graphllm.server.process.ranks.options import RankOptions
from graphllm.server.process.web import WebServer

_log = logging.getLogger(__name__)
_TICK = 0.1  # seconds between two looks at the processes
_BACKOFF = (1.0, 60.0)  # seconds before a rank is started again that was ready for less than that: first, and at most
_SOON = 10.0  # seconds
_GRACE = 10.0  # seconds that a rank may take to end, after the time for its requests
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass
class _Rank:
    """One server. status: starting, ready, unhealthy, dead, restarting. cause: why it is not ready. failures: of
    probes, in a row; dying: of those for liveness. silence: since a probe began. due: when it is started again; pause:
    seconds before the next time."""

    number: int
    port: int
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    status: str = "starting"
    cause: str | None = None
    was_ready: bool = False
    failures: int = 0
    dying: int = 0
    silence: Silence | None = None
    started: float = field(default_factory=time.monotonic)
    due: float = 0.0
    pause: float = _BACKOFF[0]


class RankSupervisor:
    """Of the ranks of ``options``. command: of one server, as arguments of this program. on_cpu: they share its
    cores."""

    def __init__(self, options: RankOptions, command: Sequence[str], on_cpu: bool) -> None:
        self._options, self._on_cpu = options, on_cpu
        self._probes = options.config.ranks
        self._ranks = [
            _Rank(n, options.config.listen.port + n, options.words(command, n)) for n in range(options.ranks)
        ]
        self._ended = asyncio.Event()
        self._code = 0

    async def run(self, listener: socket.socket) -> int:
        """Until SIGTERM or Ctrl-C, or until a rank cannot be started, or none is left; the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._ended.set)
        for rank in self._ranks:
            self._start(rank)
        server = WebServer(
            uvicorn.Config(self._application(), lifespan="off", log_config=None, access_log=False, server_header=False)
        )
        web = asyncio.create_task(server.serve([listener]))
        work = [asyncio.create_task(self._watch()), *(asyncio.create_task(self._probe(rank)) for rank in self._ranks)]
        try:
            ended = asyncio.create_task(self._ended.wait())
            await asyncio.wait({ended, *work}, return_when=asyncio.FIRST_COMPLETED)
            for task in work:
                if task.done():
                    task.result()
        finally:
            for task in work:
                task.cancel()
            await self._stop()
            server.should_exit = True
            await web
        return self._code

    # ---- processes

    def _start(self, rank: _Rank) -> None:
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus_of(rank.number, self._options.gpus)}
        # A session of its own: Ctrl-C is for this process. It lives for as long as its stdin is open.
        rank.process = subprocess.Popen(
            [sys.executable, "-m", "graphllm.cli", *rank.command],
            stdin=subprocess.PIPE,
            stdout=2,
            start_new_session=True,
            env=env,
        )
        if self._on_cpu:
            os.sched_setaffinity(rank.process.pid, cpus_of(rank.number, len(self._ranks)))
        rank.started, rank.failures, rank.dying = time.monotonic(), 0, 0

    async def _watch(self) -> None:
        """See which ones end, and bring them back where that is asked for."""
        while not self._ended.is_set():
            await asyncio.sleep(_TICK)
            for rank in self._ranks:
                if rank.process is None:
                    if self._options.config.watch.restart_engine and time.monotonic() >= rank.due:
                        self._start(rank)
                elif (code := rank.process.poll()) is not None:
                    self._lost(rank, code)
                elif rank.silence is not None:
                    rank.silence.look()

    def _lost(self, rank: _Rank, code: int) -> None:
        how = f"killed by signal {-code}" if code < 0 else f"ended with {code}"
        _log.error("rank %d was %s", rank.number, how) if code < 0 else _log.error("rank %d %s", rank.number, how)
        self._close(rank)
        rank.cause = f"its process was {how}" if code < 0 else f"its process {how}"
        rank.status = "restarting" if self._options.config.watch.restart_engine else "dead"
        if not rank.was_ready:  # what is wrong with it is wrong with its settings
            self._code = self._code or (code if code > 0 else 1)
            self._ended.set()
        elif self._options.config.watch.restart_engine:
            first, most = _BACKOFF
            soon = time.monotonic() - rank.started < _SOON
            rank.pause = min(most, 2 * rank.pause) if soon else first
            rank.due = time.monotonic() + (rank.pause if soon else 0.0)
        elif all(other.status == "dead" for other in self._ranks):
            self._code = 1
            self._ended.set()

    def _close(self, rank: _Rank) -> None:
        assert rank.process is not None
        assert rank.process.stdin is not None
        rank.process.stdin.close()
        rank.process = None

    async def _stop(self) -> None:
        """SIGTERM, and SIGKILL for those who take too long."""
        there = [rank for rank in self._ranks if rank.process is not None]
        for rank in there:
            assert rank.process is not None
            rank.process.terminate()
        deadline = time.monotonic() + self._options.config.serving.shutdown_timeout + _GRACE
        while any(r.process is not None and r.process.poll() is None for r in there) and time.monotonic() < deadline:
            await asyncio.sleep(_TICK)
        for rank in there:
            assert rank.process is not None
            if rank.process.poll() is None:
                _log.error("rank %d did not end in time", rank.number)
                rank.process.kill()
            rank.process.wait()
            self._close(rank)

    # ---- health

    async def _probe(self, rank: _Rank) -> None:
        """Look at one, again and again; while it starts, more often."""
        while True:
            interval = self._probes.dp_supervisor_probe_interval_s
            pause = interval if rank.was_ready else min(0.5, interval)
            await asyncio.sleep(pause)
            process = rank.process
            if process is None:
                continue
            pid, begun, seconds = (
                process.pid,
                time.monotonic(),
                self._probes.dp_supervisor_probe_timeout_s,
            )
            rank.silence = silence = Silence(partial(threads_of, pid), _TICK, seconds / 4)
            ready, cause = await asyncio.to_thread(self._ask, rank.port, "/health")
            live = ready or (await asyncio.to_thread(self._ask, rank.port, "/health/live"))[0]
            if process is not rank.process:  # it ended during the probe
                continue
            late = time.monotonic() - begun
            if not live and late >= seconds and silence.seconds < late / 2:  # for want of the processor: no verdict
                continue
            rank.failures = 0 if ready else rank.failures + 1
            rank.dying = 0 if live else rank.dying + 1
            if ready:
                if rank.status != "ready":
                    _log.info("rank %d is ready on port %d", rank.number, rank.port)
                rank.status, rank.cause, rank.was_ready = "ready", None, True
            elif rank.status == "ready" and rank.failures >= self._probes.dp_supervisor_probe_failure_threshold:
                _log.error("rank %d is unhealthy: %s", rank.number, cause)
                rank.status, rank.cause = "unhealthy", cause
            elif rank.status != "ready":
                rank.cause = cause

    def _ask(self, port: int, path: str) -> tuple[bool, str | None]:
        """Whether a server says yes, and why not."""
        host = _ANYWHERE.get(self._options.config.listen.host, self._options.config.listen.host)
        seconds = self._probes.dp_supervisor_probe_timeout_s
        connection: http.client.HTTPConnection
        if self._options.config.listen.ssl_certfile is not None:
            # On this machine, and only a status is read: it needs no proof of who answers.
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection = http.client.HTTPSConnection(host, port, timeout=seconds, context=context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=seconds)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            said = json.loads(response.read())
            return response.status == 200, said.get("cause") or said.get("status")
        except (OSError, ValueError, http.client.HTTPException) as problem:
            return False, f"no answer on port {port}: {problem}"
        finally:
            connection.close()

    def _application(self) -> FastAPI:
        app = FastAPI(openapi_url=None)

        def answer(good: bool) -> JSONResponse:
            return JSONResponse(self._state(), 200 if good else 503, {"cache-control": "no-store"})

        @app.get("/health/readiness")
        @app.get("/health/ready")
        @app.get("/health")
        async def ready() -> JSONResponse:
            """200 while all ranks take requests."""
            return answer(all(rank.status == "ready" for rank in self._ranks))

        @app.get("/health/liveness")
        @app.get("/health/live")
        async def live() -> JSONResponse:
            """503 when a rank is gone for good, or says of itself that only a new process can help."""
            most = self._probes.dp_supervisor_probe_failure_threshold
            return answer(
                not any(
                    rank.status == "dead" or (rank.was_ready and rank.process is not None and rank.dying >= most)
                    for rank in self._ranks
                )
            )

        return app

    def _state(self) -> dict[str, Any]:
        states = [rank.status for rank in self._ranks]
        ready = states.count("ready")
        status = "ready" if ready == len(states) else "degraded" if ready else states[0]
        ranks = [
            {"rank": r.number, "port": r.port, "status": r.status, **({"cause": r.cause} if r.cause else {})}
            for r in self._ranks
        ]
        return {"status": status, "ranks": ranks}


def supervise(options: RankOptions, command: Sequence[str], on_cpu: bool) -> int:
    """Serve until SIGTERM or Ctrl-C; the exit status. Raises ConfigError for ports that cannot be used."""
    options.check()
    listen = options.config.listen
    health = ListenConfig(host=listen.host, port=options.config.ranks.data_parallel_supervisor_port)
    with listening(health) as listener:

        async def run() -> int:
            supervisor = RankSupervisor(options, command, on_cpu)
            _log.info(
                "health of %d ranks on ports %d to %d: http://%s:%d/health",
                options.ranks, listen.port, listen.port + options.ranks - 1, listen.host, health.port,
            )  # fmt: skip
            return await supervisor.run(listener)

        return asyncio.run(run())
