"""Tokens per second of a server by the number of its processes that speak HTTP, where they are the limit.

A core without a model answers every request with tokens as fast as they are taken, and streams of chats are read by
processes of their own, which look at nothing but the end. `python -m bench fronts --fronts 1,2,4 --streams 256` takes
90 s. It needs a core for each front, one for the stub, one for each two fronts' readers. A row has what the server's
processes used of the CPUs, too.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from bench.harness import CPUS, Case, worker_environment

TOKENS = 500  # of a stream; the fronts let 262,144 wait for their readers, so 256 streams may come at once
CASES = [("fronts", {"fronts": (1, 2), "streams": 256, "tokens": TOKENS, "clients": max(1, CPUS // 4)})]
HELP = {
    "fronts": "numbers of processes that speak HTTP",
    "tokens": "tokens of a stream",
    "clients": "processes that read",
}
ROUNDS = 3
PROGRAM = (sys.executable, "-m", "bench.cases.server.fronts")
_WARM = 8  # tokens of each stream of the round before
_CONTEXT = 4096


class StubCore:
    """The interface of EngineCore: one token for each request in each step, and nothing to compute."""

    def __init__(self, vocab: int, token: int) -> None:
        from graphllm.engine.requests.request import CoreInfo

        self.info = CoreInfo(_CONTEXT, vocab, 4096, 1 << 16, 16, 1 << 16, _CONTEXT, 20, 1024, "stub")
        self._token, self._live, self._aborted, self._steps = token, {}, [], 0  # type: ignore[var-annotated]
        self.kernels_done, self.wakeup_fd = 0, None

    @property
    def unfinished(self) -> int:
        return len(self._live) + len(self._aborted)

    def add(self, request: Any) -> None:
        self._live[request.id] = request.limit

    def abort(self, ids: Iterable[str]) -> None:
        self._aborted += [id for id in ids if self._live.pop(id, None) is not None]

    def step(self) -> list[Any]:
        from graphllm.engine.requests.request import EngineCoreOutput

        self._steps += 1
        news, tokens = [EngineCoreOutput(id, [], "abort") for id in self._aborted], [self._token]
        self._aborted = []
        for id, left in list(self._live.items()):
            news.append(EngineCoreOutput(id, tokens, None if left > 1 else "length"))
            self._live[id] = left - 1
            if left == 1:
                del self._live[id]
        return news

    def stats(self) -> Any:
        from graphllm.engine.requests.request import CoreStats

        return CoreStats(steps=self._steps, running=len(self._live))

    def reset_prefix_cache(self) -> bool:
        return True

    def collective_rpc(self, call: Any, timeout: float | None = None) -> list[Any]:
        return []

    def warm_up(self) -> bool:
        return False

    def check_health(self) -> None:
        pass

    def hear(self) -> None:
        pass

    def close(self) -> None:
        pass


def core() -> None:
    """The program of the stub."""
    from graphllm.engine.process.core_loop import run_core

    def load(settings: dict[str, Any], phase: Callable[[str, float], None]) -> StubCore:
        from graphllm.engine.requests.text import Tokenizer

        tokenizer = Tokenizer.from_folder(settings["model"]["model"])
        return StubCore(tokenizer.vocab_size, tokenizer.encode("a", add_special_tokens=False)[-1])

    run_core(load)


def server(fronts: int) -> None:
    """The program of a server that has the stub as its engine."""
    from graphllm.config import CoreConfig, EngineArgs
    from graphllm.config.requests.sampling_params import SamplingParams
    from graphllm.config.server import server_config
    from graphllm.config.setting import assemble
    from graphllm.embedded import MODEL_DIR
    from graphllm.engine.process.spawn import spawn
    from graphllm.engine.requests.text import Tokenizer
    from graphllm.loading.artifact.model import ResolvedModel
    from graphllm.server.process.launch import Opening, serve
    from graphllm.server.process.options import ServerOptions
    from graphllm.server.supervision.engine_view import SupervisorOptions
    from graphllm.server.supervision.logs import start_log

    tokenizer = Tokenizer.from_folder(MODEL_DIR)
    resolved = {"model": str(MODEL_DIR), "tokenizer": str(MODEL_DIR), "artifact": "", "threads": 1, "stop_ids": ()}
    config = assemble(CoreConfig, vars(EngineArgs(disable_log_stats=True)) | resolved)
    server = server_config({"port": 0, "api_server_count": fronts, "disable_uvicorn_access_log": True})
    start_log(server.log)
    options = ServerOptions(server, names=("stub",))
    opened = ResolvedModel(config, tokenizer, SamplingParams(max_tokens=None), [], "stub")
    child = spawn((*PROGRAM, "core"))
    sys.exit(serve([Opening(("stub",), lambda: opened, SupervisorOptions(), [child])], options))


def load(port: int, streams: int, tokens: int) -> None:
    """The program that reads: a line when all are connected, one from stdin to begin, then seconds and chunks."""
    import uvloop

    body = {"messages": [{"role": "user", "content": "a"}], "stream": True, "max_tokens": tokens, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    request = f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + data

    class Reader(asyncio.Protocol):
        def __init__(self) -> None:
            self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.chunks, self._tail = 0, b""

        def data_received(self, data: bytes) -> None:
            self.chunks += data.count(b"data: {")
            self._tail = (self._tail + data)[-64:]
            if b"data: [DONE]" in self._tail and not self.done.done():
                self.done.set_result(None)

        def connection_lost(self, exc: Exception | None) -> None:
            if not self.done.done():
                self.done.set_exception(exc or ConnectionError("a stream broke off"))

    async def run() -> None:
        loop = asyncio.get_running_loop()
        readers = [await loop.create_connection(Reader, "127.0.0.1", port) for _ in range(streams)]
        print("connected", flush=True)
        await loop.run_in_executor(None, sys.stdin.readline)
        for transport, _ in readers:
            transport.write(request)
        await asyncio.gather(*(reader.done for _, reader in readers))
        print(json.dumps({"end": time.monotonic(), "chunks": sum(reader.chunks for _, reader in readers)}), flush=True)

    uvloop.run(run())


def _round(port: int, streams: int, tokens: int, clients: int) -> dict[str, float]:
    shares = [streams // clients + (i < streams % clients) for i in range(clients)]
    readers = [
        subprocess.Popen(
            [*PROGRAM, "load", str(port), str(share), str(tokens)], env=worker_environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for share in shares
    ]  # fmt: skip
    for reader in readers:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "connected\n"
    begun = time.monotonic()
    for reader in readers:
        assert reader.stdin is not None
        reader.stdin.write("go\n")
        reader.stdin.flush()
    ends = []
    for reader in readers:
        assert reader.stdout is not None
        ends.append(json.loads(reader.stdout.readline()))
        reader.wait()
    seconds = max(end["end"] for end in ends) - begun
    return {"tokens_per_s": streams * tokens / seconds, "chunks_per_s": sum(e["chunks"] for e in ends) / seconds}


def _cpu(pid: int) -> dict[str, float]:
    """Seconds of CPU of a server's processes so far, by what they are."""
    found = {}
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in [str(pid), *children]:
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        front = b"graphllm.server.process.fronts.front" in words
        name = words[-2].decode() if front else "core" if b"core" in words else "server"
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        found[name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def measure(fronts: int, streams: int, tokens: int, clients: int) -> dict[str, Any]:
    """The median round of a server with ``fronts`` fronts."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*PROGRAM, "server", str(fronts)], stderr=log, stdout=log, env=worker_environment())
        try:
            deadline = time.monotonic() + 60
            while "ready in" not in (text := _text(log)):
                assert process.poll() is None, text
                assert time.monotonic() < deadline, text
                time.sleep(0.05)
            port = int(re.search(r"listening on \S+:(\d+)", text)[1])  # type: ignore[index]
            time.sleep(2)  # all of them are there
            _round(port, streams, _WARM, clients)
            before, begun = _cpu(process.pid), time.monotonic()
            rounds = [_round(port, streams, tokens, clients) for _ in range(ROUNDS)]
            seconds = time.monotonic() - begun
            busy = {name: round((used - before[name]) / seconds, 2) for name, used in _cpu(process.pid).items()}
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
    medians = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    return {"fronts": fronts, **medians, "rounds": [r["tokens_per_s"] for r in rounds], "cpu": busy}


def _text(log: Any) -> str:
    log.seek(0)
    return str(log.read())


def run(case: Case) -> Iterator[dict[str, Any]]:
    """A row for each number of fronts. ratio: to the first of them."""
    first: dict[str, Any] = {}
    for fronts in case.fronts:
        one = measure(fronts, case.streams, case.tokens, case.clients)
        first = first or one
        cpu = {f"CPU, {name}": used for name, used in one.pop("cpu").items()}
        yield {f"{fronts} fronts": {**one, "ratio": one["tokens_per_s"] / first["tokens_per_s"], **cpu}}


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["core"]:
            core()
        case ["server", fronts]:
            server(int(fronts))
        case ["load", port, streams, tokens]:
            load(int(port), int(streams), int(tokens))
        case _:
            sys.exit("usage: python -m bench fronts")
