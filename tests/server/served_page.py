"""The chat page on a scripted server, and opened: under the strictest policy, and watched for problems."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from graphllm.server.apis.page import chat_page, page_files
from tests.server.browser import ChatPage, Chromium
from tests.server.fake_server import State


def _policy(page: str) -> str:
    """The strictest policy that the page can live with; no string may become HTML."""

    def digest(tag: str) -> str:
        (body,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", page, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src 'self' {digest('script')}; style-src 'self' {digest('style')}; "
        "font-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


def serve_page(state: State, strict: bool = True) -> None:
    text, _ = chat_page()
    headers = {"Content-Type": "text/html; charset=utf-8"}
    if strict:
        headers["Content-Security-Policy"] = _policy(text)
    state.files |= {path: (headers, text.encode()) for path in ("", "/")}
    state.files |= {f"/page/{name}": ({"Content-Type": kind}, data) for name, (kind, data) in page_files().items()}


@contextmanager
def opened(browser: Chromium, server: State, refusals: bool = False, **look: Any) -> Iterator[ChatPage]:
    """The page, which must ask nobody else and report nothing to the console but refusals that the test expects."""
    with browser.page(**look) as page:
        page.open(server.url)
        yield page
        origin = server.url.removesuffix(server.prefix)
        assert [a for a in page.addresses if not a.startswith((f"{origin}/", "data:"))] == []
        assert [p for p in page.problems if not (refusals and p.startswith("Failed to load resource"))] == []
