"""The client of `graphllm bench` against a server of known timing and faults."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
import uvloop

from graphllm.cli.bench.client import HttpClient, Timeline
from graphllm.config import ConfigError
from tests.cli.bench.fake_openai import Fake, serving
from tests.waiting import PATIENCE, until_async


def body(tokens: int = 8) -> bytes:
    return json.dumps({"prompt": [1, 2, 3], "max_tokens": tokens, "stream": True}).encode()


def stream(
    fake: Fake, *bodies: bytes, path: str = "/v1/completions", timeout: float = PATIENCE, key: str = ""
) -> list[Timeline]:
    """One after the other, by one client."""

    async def main() -> list[Timeline]:
        async with serving(fake):
            client = HttpClient(fake.url, key, timeout)
            found = [await client.stream(path, each) for each in bodies]
            client.close()
            return found

    return uvloop.run(main())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_times_are_those_of_the_server(path: str) -> None:
    fake = Fake(first=0.1, between=0.02)
    found = stream(fake, *[body(11)] * 3, path=path)
    for got, arrived, written in zip(found, fake.arrived, fake.written, strict=True):
        assert got.error is None
        assert (got.prompt_tokens, got.output_tokens, got.finish_reason) == (3, 11, "length")
        assert got.started < arrived < written[0] < got.pieces[0]
        late = np.array(got.pieces) - np.array(written)
        assert 0 < np.median(late) < np.median(np.diff(written))  # each comes before the next is written
        assert got.ttft == got.pieces[0] - got.started
        assert got.itl == pytest.approx(np.diff(got.pieces))
        assert got.ended > written[-1]
        assert got.e2el == got.ended - got.started
        assert got.tpot == pytest.approx((got.ended - got.pieces[0]) / 10)


def test_tokens_are_counted_by_the_server_and_not_by_chunks() -> None:
    (got,) = stream(Fake(between=0.05, tokens_per_piece=4), body(10))
    assert (got.output_tokens, len(got.pieces), len(got.itl)) == (10, 3, 2)
    assert got.tpot == pytest.approx((got.ended - got.pieces[0]) / 9)


@pytest.mark.parametrize("segment", [0, 1, 3, 50])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_events_may_come_in_any_segments(segment: int, line_end: str) -> None:
    (got,) = stream(Fake(segment=segment, line_end=line_end), body(5))
    assert got.error is None
    assert (len(got.pieces), got.output_tokens) == (5, 5)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("429", "HTTP 429: too many requests are waiting"),
        ("close", "closed the connection|reset by peer"),
        ("cut", "closed the connection|reset by peer"),
        ("garbage", "the reply is no HTTP: "),
        ("error", "error in the stream: the engine fell over"),
        ("no done", r"the stream ended without \[DONE\]"),
        ("no finish", "the stream ended without a finish_reason"),
        ("no usage", "the stream has no usage"),
        ("hang", "no end within 1 s"),
    ],
)
def test_failures_have_reasons_and_the_next_request_is_fine(fault: str, reason: str) -> None:
    bad, good = stream(Fake(faults={0: fault}), body(), body(), timeout=1.0 if fault == "hang" else PATIENCE)
    assert re.search(reason, bad.error or "", re.IGNORECASE), bad.error
    assert good.error is None


def test_nobody_listens() -> None:
    async def main() -> Timeline:
        async with serving(Fake()) as fake:
            url = fake.url
        return await HttpClient(url).stream("/v1/completions", body())

    assert "refused" in (uvloop.run(main()).error or "").lower() or "Connect call failed" in str(uvloop.run(main()))


def test_connections_are_kept() -> None:
    fake = Fake()
    assert all(got.error is None for got in stream(fake, *[body()] * 5))
    assert fake.connections == 1
    closing = Fake(close=True)
    assert all(got.error is None for got in stream(closing, *[body()] * 5))
    assert closing.connections == 5


def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    fake = Fake(faults={1: "stale"})
    assert [got.error for got in stream(fake, body(), body(), body())] == [None] * 3
    assert fake.connections == 2


def test_api_key_and_path_of_the_url() -> None:
    async def main(fake: Fake) -> list[Timeline]:
        async with serving(fake):
            urls = (fake.url, fake.url + "/", fake.url + "/v1", fake.url + "/v1/", fake.url + "/proxy/v1")
            return [await HttpClient(url, "secret").stream("/v1/completions", body()) for url in urls]

    fake = Fake()
    assert all(got.error is None for got in uvloop.run(main(fake)))
    assert [r["path"] for r in fake.requests] == ["/v1/completions"] * 4 + ["/proxy/v1/completions"]
    assert {h["authorization"] for h in fake.headers} == {"Bearer secret"}


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:port", ""])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^url is "):
        HttpClient(url)


def test_a_cancelled_request_gives_up_its_connection() -> None:
    async def main() -> tuple[int, Timeline]:
        async with serving(Fake(first=0.2)) as fake:
            client = HttpClient(fake.url)
            task = asyncio.create_task(client.stream("/v1/completions", body()))
            await until_async(lambda: fake.requests)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return fake.connections, await client.stream("/v1/completions", body())

    connections, after = uvloop.run(main())
    assert connections == 1
    assert after.error is None


@pytest.mark.thorough
def test_the_client_is_cheap() -> None:
    """64 streams without pauses: with the fake server, it takes little more than a client that reads no word."""

    async def read_no_word(fake: Fake) -> None:
        reader, writer = await asyncio.open_connection(*fake.url.removeprefix("http://").split(":"))
        head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(body(300))}\r\n\r\n"
        writer.write(head.encode() + body(300))
        await reader.readuntil(b"[DONE]")
        writer.close()

    async def seconds(stream: Callable[[Fake], Coroutine[Any, Any, Any]]) -> float:
        async with serving(Fake()) as fake:
            begun = time.process_time()
            await asyncio.gather(*(stream(fake) for _ in range(64)))
            return time.process_time() - begun

    def client(fake: Fake) -> Coroutine[Any, Any, Timeline]:
        return HttpClient(fake.url).stream("/v1/completions", body(300))

    costs = [min(uvloop.run(seconds(stream)) for _ in range(3)) for stream in (client, read_no_word)]
    assert costs[0] < 2 * costs[1]
