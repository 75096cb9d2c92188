"""A browser, a scripted server that has the chat page, and the page opened."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.browser import ChatPage, Chromium, chromium
from tests.server.fake_server import State, serving
from tests.server.served_page import opened, serve_page


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    """One browser for the tests of a file."""
    with chromium() as running:
        yield running


@pytest.fixture
def server() -> Iterator[State]:
    """A scripted server that has the page."""
    with serving() as state:
        serve_page(state)
        yield state


@pytest.fixture
def page(browser: Chromium, server: State) -> Iterator[ChatPage]:
    """The page, opened on a desktop."""
    with opened(browser, server) as shown:
        yield shown


@pytest.fixture
def wary_page(browser: Chromium, server: State) -> Iterator[ChatPage]:
    """The same where the server is going to refuse something."""
    with opened(browser, server, refusals=True) as shown:
        yield shown
