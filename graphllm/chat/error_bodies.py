"""The bodies of errors: OpenAI's, which all routes but Anthropic's answer with, and Anthropic's."""

from __future__ import annotations

import re
from typing import Any

_ORIGINS = {
    "prompt": ("messages", "input"),
    "messages": ("input",),
    "structured_outputs": ("response_format", "text", "tools"),
    "response_format": ("text",),
    "max_tokens": ("max_completion_tokens", "max_output_tokens"),
    "logprobs": ("top_logprobs",),
    "tool_choice": ("tools",),  # which make it auto
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error_body(message: str, body: object = None, type: str = "invalid_request_error") -> dict[str, Any]:
    """The body of an error. message: of a ConfigError about ``body``, so it begins with a field, which is named."""
    found = re.match(r"\w+", message)
    param = found[0] if found else None
    fields = body if isinstance(body, dict) else {}
    if param == "logprobs" and fields.get(param) is True:
        param = "top_logprobs"  # in a chat the number has this name
    if param not in fields:  # what a field was turned into, in this API or another
        param = next((origin for origin in _ORIGINS.get(param or "", ()) if origin in fields), None)
    return {"error": {"message": message, "type": type, "param": param, "code": None}}


def anthropic_error_body(status: int, message: str) -> dict[str, Any]:
    """The body of an error under Anthropic's routes, for an HTTP status from 400."""
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
