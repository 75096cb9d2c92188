"""The chat page as it is sent: one file, under a policy that lets it run nothing else and talk to nobody else."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from fastapi.responses import HTMLResponse


def chat_page() -> HTMLResponse:
    """The page, read once."""
    text = (resources.files("graphllm.server") / "page" / "index.html").read_text(encoding="utf-8")

    def digest(tag: str) -> str:
        (body,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", text, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'"

    policy = (
        f"default-src 'none'; script-src {digest('script')}; style-src {digest('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        # No string becomes HTML, whatever a model writes.
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return HTMLResponse(text, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})
