"""The router before servers that a test plays: what it asks them, what it passes on, what it does when one fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from graphllm.config import ConfigError
from graphllm.server.router.prefill import prefill_body
from graphllm.server.router.router import Router
from graphllm.server.router.upstream import Upstream
from tests.waiting import PATIENCE

Play = Callable[[str, Any, asyncio.StreamWriter], Awaitable[None]]
PARAMS = {"do_remote_prefill": True, "remote_engine_id": "there"}


def http(status: int, body: Any, kind: str = "application/json") -> bytes:
    """A whole answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (
        b"HTTP/1.1 %d x\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (status, kind.encode(), len(data)) + data
    )


class Played:
    """A server. asked: (path, body) of all requests but looks at its health. left: connections that the other side
    closed before the answer was whole."""

    def __init__(self, play: Play) -> None:
        self.play, self.asked, self.left = play, list[tuple[str, Any]](), 0
        self.headers = list[dict[str, str]]()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        data = await reader.readexactly(int(headers["content-length"]))
        _, path, _ = first.split()
        if path == "/health":
            writer.write(http(200, {"status": "ready"}))
        else:
            body = json.loads(data) if data else None
            self.asked.append((path, body))
            self.headers.append(headers)
            answering = asyncio.ensure_future(self.play(path, body, writer))
            leaving = asyncio.ensure_future(reader.read(1))
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            self.left += not answering.done()
            answering.cancel()
        writer.close()


def says(answer: bytes) -> Play:
    async def play(path: str, body: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()

    return play


async def silent(path: str, body: Any, writer: asyncio.StreamWriter) -> None:
    """Takes for ever."""
    await asyncio.sleep(PATIENCE)


PREFILLED = says(http(200, {"choices": [], "kv_transfer_params": PARAMS}))
DECODED = says(http(200, {"choices": ["text"]}))


@asynccontextmanager
async def routing(prefill: list[Play], decode: list[Play]) -> AsyncIterator[tuple[Router, list[Played], list[Played]]]:
    """A router before servers that are played."""
    servers, found = [], ([Played(play) for play in prefill], [Played(play) for play in decode])
    ups = list[list[Upstream]]()
    for name, group in zip(("prefill", "decode"), found, strict=True):
        ups.append([])
        for one in group:
            server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
            servers.append(server)
            ups[-1].append(Upstream(name, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"))
    yield Router(*ups, max_body=1 << 20), *found
    for server in servers:
        server.close()


async def ask(
    router: Router, body: Any, path: str = "/v1/completions", leave: asyncio.Event | None = None, method: str = "POST"
) -> tuple[int, bytes]:
    """Status and body. leave: when it is set, the client goes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    told, status, pieces = False, 0, list[bytes]()

    async def receive() -> dict[str, Any]:
        nonlocal told
        if not told:
            told = True
            return {"type": "http.request", "body": data, "more_body": False}
        await (leave or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        pieces.append(message.get("body", b""))

    headers = [(b"host", b"router"), (b"authorization", b"Bearer key"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
             "headers": headers}  # fmt: skip
    await asyncio.wait_for(router(scope, receive, send), PATIENCE)
    return status, b"".join(pieces)


def test_both_are_asked() -> None:
    async def work() -> None:
        async with routing([PREFILLED] * 2, [DECODED]) as (router, prefill, (decode,)):
            body = {"prompt": "a", "max_tokens": 9, "stream": False, "temperature": 0.5, "n": 2, "stop": ["x"]}
            for _ in range(2):
                assert await ask(router, body) == (200, b'{"choices": ["text"]}')
            assert [len(one.asked) for one in prefill] == [1, 1]  # in turn
            path, asked = prefill[0].asked[0]
            assert path == "/v1/completions"
            assert {k: v for k, v in asked.items() if k != "kv_transfer_params"} == {
                "prompt": "a", "max_tokens": 1, "stream": False, "temperature": 0.5,
            }  # fmt: skip
            assert asked["kv_transfer_params"]["do_remote_decode"] is True
            assert decode.asked[0] == (path, {**body, "kv_transfer_params": PARAMS})
            both = [one.headers[0] for one in (prefill[0], decode)]
            assert {headers["authorization"] for headers in both} == {"Bearer key"}
            assert both[0]["x-request-id"] == both[1]["x-request-id"]

    asyncio.run(work())


@pytest.mark.parametrize(
    "broken",
    [says(b""), says(b"no http"), says(http(429, {})), says(http(503, {})), says(http(200, b"no json")),
     says(b"HTTP/1.1 200 x\r\ncontent-length: 90\r\n\r\nhalf")],
    ids=["closes", "no http", "full", "not ready", "no json", "half"],
)  # fmt: skip
def test_a_server_for_prompts_that_fails(broken: Play) -> None:
    async def work() -> None:
        async with routing([broken], [DECODED]) as (router, _, (decode,)):
            assert await ask(router, {"prompt": "a"}) == (200, b'{"choices": ["text"]}')
            assert decode.asked == [("/v1/completions", {"prompt": "a"})]

    asyncio.run(work())


def test_a_server_that_hangs_is_left() -> None:
    async def work() -> None:
        async with routing([silent], [DECODED]) as (router, (prefill,), _):
            asking = asyncio.ensure_future(ask(router, {"prompt": "a"}))
            while not prefill.asked:
                await asyncio.sleep(0.001)
            (up,) = router.prefill
            up.down.set()  # as when it does not answer a look
            assert (await asking)[0] == 200
            await up.look()
            assert not up.down.is_set()

    asyncio.run(work())


def test_mistakes_are_passed_on() -> None:
    async def work() -> None:
        refusal = http(400, {"error": {"message": "temperature is -1"}})
        async with routing([says(refusal)], [DECODED]) as (router, _, (decode,)):
            status, body = await ask(router, {"prompt": "a", "temperature": -1})
            assert (status, json.loads(body)["error"]["message"]) == (400, "temperature is -1")
            assert decode.asked == []
        async with routing([PREFILLED], [says(refusal)]) as (router, _, (decode,)):
            assert (await ask(router, {"prompt": "a"}))[0] == 400
            assert (await ask(router, b"{", "/v1/completions"))[0] in (400, 503)

    asyncio.run(work())


def test_nobody_goes_on() -> None:
    async def work() -> None:
        async with routing([PREFILLED], [says(b"")]) as (router, _, _):
            status, body = await ask(router, {"prompt": "a"})
            assert status == 503
            assert "no server that goes on with prompts answers" in json.loads(body)["error"]["message"]
            assert (await ask(router, b"", "/health", method="GET"))[0] == 503
            assert (await ask(router, b"x" * (1 << 20 | 1)))[0] == 413

    asyncio.run(work())


def test_a_stream_that_breaks_off_says_so() -> None:
    async def work() -> None:
        head = b"HTTP/1.1 200 x\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        event = b'data: {"choices": []}\n\n'
        async with routing([PREFILLED], [says(head + b"%x\r\n%s\r\n" % (len(event), event))]) as (router, _, _):
            status, body = await ask(router, {"prompt": "a", "stream": True})
            assert status == 200
            first, _, rest = body.partition(b"\n\n")
            assert first == event.strip()
            assert "ended in the middle" in json.loads(rest.strip().removeprefix(b"data: "))["error"]["message"]

    asyncio.run(work())


@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_a_client_that_leaves(which: str) -> None:
    async def work() -> None:
        plays = {"prefill": PREFILLED, "decode": DECODED, which: silent}
        async with routing([plays["prefill"]], [plays["decode"]]) as (router, prefill, decode):
            (server,) = prefill if which == "prefill" else decode
            leave = asyncio.Event()
            asking = asyncio.ensure_future(ask(router, {"prompt": "a"}, leave=leave))
            while not server.asked:
                await asyncio.sleep(0.001)
            leave.set()
            await asking
            while not server.left:
                await asyncio.sleep(0.001)

    asyncio.run(work())


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
        {"prompt": "a", "use_beam_search": True},
        {"prompt": "a", "echo": True, "logprobs": 1},
        {"messages": [], "prompt_logprobs": 0},
        {"prompt": "a", "kv_transfer_params": {"do_remote_decode": True}},
    ],
)
def test_prompts_that_are_computed_where_they_go_on(body: dict[str, Any]) -> None:
    assert prefill_body(body) is None


def test_chats() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": ["m"], "max_completion_tokens": 7, "tools": [tool], "tool_choice": "required", "stream": True,
            "response_format": {"type": "json_object"}, "min_tokens": 3, "echo": False}  # fmt: skip
    found = prefill_body(body)
    assert found is not None
    del found["kv_transfer_params"]
    assert found == {"messages": ["m"], "max_completion_tokens": 1, "max_tokens": 1, "tools": [tool],
                     "tool_choice": "auto", "stream": False, "echo": False}  # fmt: skip


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://a", "http://", "http://a:b", "http://a?b"])
def test_urls_that_cannot_be(url: str) -> None:
    with pytest.raises(ConfigError, match=r"prefill is .*127\.0\.0\.1:8100"):
        Upstream("prefill", url)
