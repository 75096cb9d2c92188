"""The chat page as a person uses it: headless Chromium, the real server, the embedded model."""

from __future__ import annotations

import io
import re

import pytest

from tests.server.browser import DESKTOP, PHONE, ChatPage, Chromium, needs_chromium
from tests.server.live import Served

pytestmark = needs_chromium


def _ink(page: ChatPage) -> float:
    """Share of the window's pixels that differ from its background."""
    from PIL import Image

    picture = Image.open(io.BytesIO(page.tab.screenshot())).convert("RGB")
    counts = sorted(picture.getcolors(picture.width * picture.height) or [], reverse=True)
    return 1 - counts[0][0] / (picture.width * picture.height)


@pytest.mark.parametrize(("size", "colors"), [(DESKTOP, "light"), (PHONE, "dark")])
def test_a_conversation(served: Served, browser: Chromium, size: tuple[int, int], colors: str) -> None:
    with browser.page(size, colors) as page:  # type: ignore[arg-type]
        page.open(served.url)
        page.tab.get_by_role("heading", name="Ask graphllm-embedded").wait_for()
        before = _ink(page)
        page.ask("What is 12 + 7?")
        page.wait_until_done()
        assert page.answers() == ["12 + 7 = 19."]
        found = re.search(r"first token (\d+) ms · (\d+) in( \(\d+ cached\))? · (\d+) out", page.figures())
        assert found is not None
        assert int(found[1]) < 30_000
        page.ask("What is the capital of France?")
        page.wait_until_done()
        assert len(page.answers()) == 2
        assert "Paris" in page.answers()[1]
        assert 0.01 < before < 0.9
        assert 0.01 < _ink(page) < 0.9
        assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        message, answer = page.box("#composer"), page.box(".prose")
        assert answer.apart(message)
        assert 0 <= message.left < message.right <= size[0]
        assert message.bottom <= size[1]
        assert page.problems == []
        assert all(address.startswith(served.url) for address in page.addresses)


def test_stop_frees_the_engine(served: Served, browser: Chromium) -> None:
    with browser.page() as page:
        page.open(served.url)
        page.settings(Temperature="2", Max_tokens="900")
        page.ask("Tell me a very long story about everything.")
        page.tab.locator(".prose").last.wait_for()
        page.tab.keyboard.press("Escape")  # stops it, if it has not ended by itself
        page.wait_until_done()
    served.idle()
