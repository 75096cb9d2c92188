"""OpenAI's own client of the server that tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.server.live import Served
from tests.waiting import PATIENCE


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE) as client:
        yield client
