"""The chat page as it is sent: a document and its own files, under a policy that lets it run nothing else and talk to
nobody else."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import HTMLResponse, Response

_PAGE = resources.files("graphllm.server.page")
_TYPES = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8", "woff2": "font/woff2"}


def chat_page() -> tuple[str, str]:
    """The document and its policy. Its style is put into it, so that it is never seen without."""
    folder = _PAGE
    page, style = ((folder / name).read_text(encoding="utf-8") for name in ("index.html", "style.css"))
    page = page.replace('<link rel="stylesheet" href="style.css">', f"<style>{style}</style>")
    (script,) = re.findall(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    policy = (
        f"default-src 'none'; script-src 'self' {_digest(script)}; style-src 'self' {_digest(style)}; "
        "font-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        # No string becomes HTML, whatever a model writes.
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return page, policy


def page_files() -> dict[str, tuple[str, bytes]]:
    """Type and content of every file that the document loads, by its path below ``page/``."""
    return {
        name: (_TYPES[name.rpartition(".")[2]], file.read_bytes())
        for name, file in _walk(_PAGE)
        if name.rpartition(".")[2] in _TYPES
    }


def _walk(folder: Traversable, before: str = "") -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{before}{entry.name}/")
        else:
            yield before + entry.name, entry


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def page_routes() -> APIRouter:
    """The routes of the page; its files are read once. A browser asks again each time and learns when its copy is the
    same: after an update no old file meets a new one."""
    router = APIRouter()
    page, policy = chat_page()
    response = HTMLResponse(page, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})
    files = {
        name: (f'"{hashlib.sha256(content).hexdigest()[:32]}"', kind, content)
        for name, (kind, content) in page_files().items()
    }

    @router.get("/", include_in_schema=False)
    async def root() -> Response:
        return response

    @router.get("/page/{name:path}", include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        if name not in files:
            raise HTTPException(404)
        tag, kind, content = files[name]
        headers = {"ETag": tag, "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    return router
