"""The chat page as it is sent: one file, under a policy that lets it run nothing else and talk to nobody else."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response


def chat_page() -> tuple[str, str]:
    """The page and its policy. Style and script are put into the document: with addresses of their own they would be
    looked for beside the page, which is elsewhere when it is asked for below a prefix without the last slash."""
    folder = resources.files(__package__)
    page, style, script = (
        (folder / name).read_text(encoding="utf-8") for name in ("index.html", "style.css", "app.js")
    )
    for reference, tag, text in (
        ('<link rel="stylesheet" href="style.css">', "style", style),
        ('<script type="module" src="app.js"></script>', 'script type="module"', script),
    ):
        assert page.count(reference) == 1
        page = page.replace(reference, f"<{tag}>{text}</{tag.split()[0]}>")
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        # No string becomes HTML, whatever a model writes.
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return page, policy


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def page_routes() -> APIRouter:
    """The route of the page, which is read once."""
    router = APIRouter()
    page, policy = chat_page()
    response = HTMLResponse(page, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})

    @router.get("/", include_in_schema=False)
    async def root() -> Response:
        return response

    return router
