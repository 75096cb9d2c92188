"""A server for prompts, one that goes on with them, and a router in front: answers are those of one server. They are
started by the commands of docs/disaggregated-prefill.md, on other ports."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from tests.server.live import Served
from tests.server.sdk import MODEL, SUM, fresh

pytestmark = pytest.mark.thorough
PROMPT = "A long time ago there was a small town by the sea, and in this town lived an old man who had a dog. " * 2


class Routing(Served):
    """A router."""

    verb = "route"


class Parts(NamedTuple):
    """The processes."""

    prefill: Served
    decode: Served
    router: Routing

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.router.url}/v1", api_key="none", max_retries=0)


GUIDE = (
    (Path(__file__).parents[2] / "docs" / "disaggregated-prefill.md").read_text().partition("## Between machines")[0]
)
COMMANDS = [shlex.split(text) for text in re.findall(r"```bash\n(graphllm .*?)```", GUIDE, flags=re.DOTALL)]


def start(place: Path, artifact: Path) -> Parts:
    """All three. place: for their logs, and where the engines meet."""
    of_prefill, of_decode, of_router = ([word for word in words if word != "\n"] for words in COMMANDS)
    ports = {words[words.index("--port") + 1]: words for words in (of_prefill, of_decode)}

    def options(words: list[str]) -> list[str]:
        at = words.index("--port")
        return [*words[2:at], *words[at + 2 :]]

    def engine(name: str, words: list[str]) -> Served:
        assert words[:2] == ["graphllm", "serve"]
        return Served(
            place / name, *options(words), "--artifact", artifact, environment={"XDG_RUNTIME_DIR": str(place)}
        )

    prefill, decode = engine("prefill", of_prefill), engine("decode", of_decode)
    assert of_router[:2] == ["graphllm", "route"]
    urls = dict(zip(ports, (prefill.url, decode.url), strict=True))
    words = [urls.get(word.removeprefix("http://127.0.0.1:"), word) for word in options(of_router)]
    router = Routing(place / "router", *words)
    for server in (prefill, decode, router):
        server.wait_ready()
    return Parts(prefill, decode, router)


@pytest.fixture(scope="module")
def parts(embedded_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    """For tests that leave them as they were."""
    found = start(tmp_path_factory.mktemp("parts"), embedded_artifact)
    yield found
    for server in reversed(found):
        assert server.stop() == 0, server.log.read_text()


def cached(usage: Any) -> int:
    """Tokens of the prompt that were not computed where it was gone on with."""
    return usage.prompt_tokens_details.cached_tokens


def test_the_guides_request(parts: Parts) -> None:
    (command,) = re.findall(r"```bash\n(curl .*?)```", GUIDE, flags=re.DOTALL)
    words = shlex.split(command)
    assert words[1].endswith(":8000/v1/completions")
    status, reply, _ = parts.router.post("/v1/completions", words[words.index("-d") + 1].encode())
    assert status == 200
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


def test_a_completion(parts: Parts, served: Served) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20, "temperature": 0.0}
    alone = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none").completions.create(**body, **fresh())
    reply = parts.client.completions.create(**body, **fresh())
    assert reply.choices[0].text == alone.choices[0].text
    assert reply.usage is not None
    assert cached(reply.usage) >= 32


def test_a_streamed_chat(parts: Parts, served: Served) -> None:
    body: Any = {
        "model": MODEL,
        "messages": [{"role": "system", "content": PROMPT}, *SUM],
        "max_tokens": 20,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    texts = []
    for client in (openai.OpenAI(base_url=f"{served.url}/v1", api_key="none"), parts.client):
        chunks = list(client.chat.completions.create(**body, **fresh()))
        texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
    assert texts[0] == texts[1]
    assert cached(chunks[-1].usage) >= 32


def test_what_goes_to_one_server_only(parts: Parts, served: Served) -> None:
    body = {"prompt": [PROMPT, "Hi"], "max_tokens": 5, "temperature": 0, "n": 1, "cache_salt": "several"}
    answers = [server.post("/v1/completions", body)[1]["choices"] for server in (served, parts.router)]
    assert answers[0] == answers[1]
    assert json.loads(parts.router.get("/v1/models")[1])["data"][0]["id"] == MODEL
    assert parts.router.post("/tokenize", {"prompt": "Hi"})[1] == served.post("/tokenize", {"prompt": "Hi"})[1]
    assert json.loads(parts.router.get("/health")[1]) == {"status": "ready"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b"{"),
        ("/v1/completions", {"prompt": "Hi", "temperature": -1}),
        ("/v1/completions", {"prompt": [5] * 9000}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/nothing", {}),
    ],
)
def test_errors_are_the_servers_own(parts: Parts, served: Served, path: str, body: Any) -> None:
    found = [server.post(path, body)[:2] for server in (served, parts.router)]
    assert found[0][0] >= 400
    assert found[0] == found[1]


def test_a_client_that_leaves_ends_the_work(parts: Parts) -> None:
    stream = parts.client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert parts.decode.metric("graphllm_requests_running") == 1
    stream.close()
    parts.decode.idle()


def test_deaths(embedded_artifact: Path, tmp_path: Path, served: Served) -> None:
    """Of the engine for prompts while it is asked, of its server, and of the server that goes on."""
    parts = start(tmp_path, embedded_artifact)
    try:
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        expected = served.post("/v1/completions", body)[1]["choices"][0]["text"]
        os.kill(parts.prefill.engine_pid, signal.SIGKILL)
        for salt in ("a", "b"):
            status, reply, _ = parts.router.post("/v1/completions", {**body, "cache_salt": salt})
            assert (status, reply["choices"][0]["text"]) == (200, expected)
        parts.prefill.stop(signal.SIGKILL)
        status, reply, _ = parts.router.post("/v1/completions", {**body, "cache_salt": "c"})
        assert (status, reply["choices"][0]["text"]) == (200, expected)
        parts.router.wait(lambda: json.loads(parts.router.get("/health")[1])["status"] == "degraded")
        parts.decode.stop(signal.SIGKILL)
        status, reply, _ = parts.router.post("/v1/completions", body)
        assert status == 503
        assert reply["error"]["type"] == "server_error"
        parts.router.wait(lambda: parts.router.get("/health")[0] == 503)
    finally:
        for server in parts:
            server.process.kill()
            server.process.wait()
