"""A server for prompts, one that goes on with them, and a router in front: answers are those of one server."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from tests.server.live import Served
from tests.server.sdk import MODEL, SUM, fresh

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


def start(place: Path, artifact: Path, *more: object) -> Parts:
    """All three. place: for their logs, and where the engines meet."""

    def engine(role: str) -> Served:
        config = {
            "kv_connector": "HostConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"folder": str(place / "meet")},
        }
        options = ("--artifact", artifact, "--kv-offloading-size", "64MiB", "--kv-transfer-config", json.dumps(config))
        return Served(place / role, *options, *more)

    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    router = Routing(place / "router", "--prefill", prefill.url, "--decode", decode.url)
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


def test_a_completion(parts: Parts, served: Served) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20, "temperature": 0.0}
    alone = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none").completions.create(**body, **fresh())
    reply = parts.client.completions.create(**body, **fresh())
    assert reply.choices[0].text == alone.choices[0].text
    assert reply.usage is not None
    print(reply.usage)
    assert cached(reply.usage) >= 32
