"""Drives the chat page in headless Chromium: what a person would do and see, for the tests of the page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import pytest

from tests.waiting import PATIENCE

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path: install it to test the page")
DESKTOP, PHONE = (1280, 800), (390, 844)


class Box(NamedTuple):
    """Where an element lies in the window, in CSS pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def apart(self, other: Box) -> bool:
        """Whether the two do not overlap."""
        beside = self.right <= other.left or other.right <= self.left
        return beside or self.bottom <= other.top or other.bottom <= self.top


class ChatPage:
    """The page in a tab. problems: console errors and exceptions. addresses: all that it asked for. Where a thing is
    not there in time, playwright's TimeoutError is raised."""

    def __init__(self, tab: Any) -> None:
        self.tab = tab
        self.problems: list[str] = []
        self.addresses: list[str] = []
        tab.set_default_timeout(PATIENCE * 1000)
        tab.on("console", lambda message: self.problems.append(message.text) if message.type == "error" else None)
        tab.on("pageerror", lambda reason: self.problems.append(str(reason)))
        tab.on("request", lambda request: self.addresses.append(request.url))

    def open(self, url: str) -> None:
        """Load the page and wait for the model's name."""
        self.tab.goto(url)
        self.tab.get_by_role("heading", name="Ask ").wait_for()

    def ask(self, question: str) -> None:
        """Type a question and send it."""
        self.tab.get_by_label("Message", exact=True).fill(question)
        self.tab.keyboard.press("Enter")

    def answers(self) -> list[str]:
        """The answers' texts so far, as shown."""
        return [text.strip() for text in self.tab.locator(".prose").all_inner_texts()]

    def wait_for_text(self, text: str) -> None:
        """Until this stands in the conversation."""
        self.tab.get_by_role("log").get_by_text(text).last.wait_for()

    def wait_until_done(self) -> None:
        """Until no answer is being written."""
        self.tab.locator(".answer").last.wait_for(state="attached")
        self.tab.locator(".answer[aria-busy=true]").wait_for(state="detached")

    def figures(self) -> str:
        """The line below the last answer."""
        return str(self.tab.locator(".figures").last.inner_text())

    def stop(self) -> None:
        """Press the stop button."""
        self.tab.get_by_role("button", name="Stop").click()

    def settings(self, **fields: str) -> None:
        """Fill in settings, by their labels (_ for a space), and save them."""
        self.tab.get_by_role("button", name="Settings").click()
        for name, value in fields.items():
            self.tab.locator("#settings").get_by_label(name.replace("_", " "), exact=True).fill(value)
        self.tab.get_by_role("button", name="Save").click()

    def box(self, selector: str) -> Box:
        """Where the last element of this selector is. Raises TypeError where it is not shown."""
        found = self.tab.locator(selector).last.bounding_box()
        return Box(found["x"], found["y"], found["x"] + found["width"], found["y"] + found["height"])


class Chromium:
    """A running browser."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser

    @contextmanager
    def page(
        self,
        size: tuple[int, int] = DESKTOP,
        colors: Literal["light", "dark"] = "light",
        motion: Literal["no-preference", "reduce"] = "reduce",
    ) -> Iterator[ChatPage]:
        """A tab with a storage of its own."""
        context = self._browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=colors, reduced_motion=motion,
            has_touch=size == PHONE, is_mobile=size == PHONE,
        )  # fmt: skip
        try:
            yield ChatPage(context.new_page())
        finally:
            context.close()


@contextmanager
def chromium() -> Iterator[Chromium]:
    """Start the browser; it ends with the block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield Chromium(browser)
        finally:
            browser.close()
