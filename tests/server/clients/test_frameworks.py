"""Frameworks that people put before a server, as they are installed: each does what its users do with it.

Their packages are not in the usual environment; a test is skipped where its own is missing.
"""

from __future__ import annotations

from typing import Any

import pytest
from live import Served
from sdk import MODEL

pytestmark = pytest.mark.slow
QUESTION = "What is 12 + 7?"


def test_langchain(served: Served) -> None:
    chat: Any = pytest.importorskip("langchain_openai").ChatOpenAI(
        model=MODEL, base_url=served.url + "/v1", api_key="none", temperature=0
    )
    assert "19" in chat.invoke(QUESTION).content
    assert "19" in "".join(chunk.content for chunk in chat.stream(QUESTION))
