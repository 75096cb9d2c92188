"""A small OpenAI server of known timing and known faults, for the tests of `graphllm bench`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.waiting import PATIENCE


@dataclass
class Fake:
    """How it behaves. Seconds: before the first piece, between pieces. fault: what goes wrong, by number of the request
    (from 0 on, of POSTs): "429", "close" before the reply, "cut" in the stream, "garbage", "error" in the stream,
    "no done", "no finish", "no usage", "hang", "stale" (the connection closes without a word, once).
    """

    first: float = 0.0
    between: float = 0.0
    tokens_per_piece: int = 1
    max_model_len: int | None = 4096
    line_end: str = "\n"
    segment: int = 0  # bytes of one write, 0 for all
    close: bool = False  # after each reply
    faults: dict[int, str] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)  # as the next, readings of time.perf_counter
    written: list[list[float]] = field(default_factory=list)  # pieces, by request
    connections: int = 0
    running: int = 0
    peak: int = 0
    url: str = ""

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._serve(reader, writer):
                pass
        writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split()
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if method == "GET":
            return await self._get(path, writer)
        number = len(self.requests)
        self.requests.append({"path": path, **json.loads(body)})
        self.headers.append(headers)
        self.arrived.append(time.perf_counter())
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            return await self._post(self.requests[-1], self.faults.get(number), writer)
        finally:
            self.running -= 1

    async def _get(self, path: str, writer: asyncio.StreamWriter) -> bool:
        found: dict[str, Any] = {
            "/v1/models": {"object": "list", "data": [{"id": "fake", "max_model_len": self.max_model_len}]},
            "/version": {"version": "1.2.3"},
        }
        text = json.dumps(found.get(path, {"error": {"message": "no such path"}}))
        status = "200 OK" if path in found else "404 Not Found"
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
        return True

    async def _post(self, body: dict[str, Any], fault: str | None, writer: asyncio.StreamWriter) -> bool:
        if fault == "429":
            text = json.dumps({"error": {"message": "too many requests are waiting", "type": "x", "code": None}})
            writer.write(f"HTTP/1.1 429 Too Many\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
            return True
        if fault in ("close", "stale"):
            writer.transport.abort()
            return False
        if fault == "garbage":
            writer.write(b"what?\r\n\r\n")
            return False
        if fault == "hang":
            await asyncio.sleep(3600)
        after = "Connection: close\r\n" if self.close else ""
        writer.write(
            f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{after}Transfer-Encoding: chunked\r\n\r\n".encode()
        )
        chat = body["path"].endswith("chat/completions")
        if chat:
            await self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(self.first)
        left = body["max_tokens"]
        pieces: list[float] = []
        self.written.append(pieces)
        while left > 0:
            count = min(left, self.tokens_per_piece)
            pieces.append(time.perf_counter())
            text = "é " * count
            choice: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            await self._event(writer, {"choices": [{"index": 0, **choice, "finish_reason": None}]})
            left -= count
            if fault == "cut" and left < body["max_tokens"] // 2:
                writer.transport.abort()
                return False
            if fault == "error":
                await self._event(writer, {"error": {"message": "the engine fell over"}})
                break
            if left:
                await asyncio.sleep(self.between)
        ended: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
        if fault != "no finish":
            await self._event(writer, {"choices": [{"index": 0, **ended, "finish_reason": "length"}]})
        prompt = body.get("prompt")
        usage = {
            "prompt_tokens": len(prompt) if isinstance(prompt, list) else 7,
            "completion_tokens": body["max_tokens"],
        }
        if fault != "no usage":
            await self._event(writer, {"choices": [], "usage": usage})
        if fault != "no done":
            await self._event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        if self.close:
            writer.close()
        return not self.close

    async def _event(self, writer: asyncio.StreamWriter, event: object) -> None:
        text = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
        data = f"data: {text}{self.line_end * 2}".encode()
        framed = b"%x\r\n%s\r\n" % (len(data), data)
        size = self.segment or len(framed)
        for at in range(0, len(framed), size):
            writer.write(framed[at : at + size])
            if self.segment:
                await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def serving(fake: Fake) -> Any:
    """Serve on this loop."""
    server = await asyncio.start_server(fake.connected, "127.0.0.1", 0, backlog=1000)
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.close()


@contextlib.contextmanager
def serving_thread(fake: Fake) -> Iterator[Fake]:
    """Serve in a thread, for what runs a loop of its own."""
    ready, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def main() -> None:
        async with serving(fake):
            ready.set()
            await stop.wait()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    ready.wait(PATIENCE)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(PATIENCE)
        loop.close()
