"""Errors as responses: OpenAI's bodies, and Anthropic's under its routes; every one says what to do."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, MutableMapping
from typing import Any

from fastapi.responses import Response

from graphllm.chat.error_bodies import anthropic_error_body, error_body
from graphllm.config import ConfigError
from graphllm.engine.process.messages import EngineDeadError
from graphllm.engine.process.sleep_orders import SleepError
from graphllm.engine.requests.request import QueueFullError
from graphllm.entrypoints.async_llm import EngineUnhealthyError
from graphllm.entrypoints.streaming.streams import SlowReaderError
from graphllm.runtime.commands.calls import RankCallError
from graphllm.server.http.wire import json_response, record_of

_FOLDERS = re.compile(r"(?<![\w/:.])(?:/[^\s/'\",;:()]+)+/(?=[^\s/'\",;:()])")
_log = logging.getLogger(__name__)
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_LONGEST = 2000  # characters of a message; names of fields, and lists of mistakes, are as long as somebody made them


class NotFoundError(Exception):
    """code: for programs."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class UnavailableError(Exception):
    """The engine takes no requests now; the message says why. retry_after: seconds, a guess."""

    def __init__(self, cause: str, retry_after: int) -> None:
        super().__init__(cause)
        self.retry_after = retry_after


class EngineFailureError(Exception):
    """The engine could not finish a request; it lives."""


def failure_error(message: str, mistake: bool) -> ConfigError | EngineFailureError:
    """What a request ends with that has a `Failure`. mistake: it is its own."""
    return ConfigError(message) if mistake else EngineFailureError(message)


KNOWN: tuple[type[Exception], ...] = (
    ConfigError,
    NotFoundError,
    UnavailableError,
    EngineDeadError,
    EngineUnhealthyError,
    EngineFailureError,
    RankCallError,
    SleepError,
    SlowReaderError,
)


def error_response(
    scope: MutableMapping[str, Any],
    status: int,
    message: str,
    headers: Mapping[str, str] | None = None,
    code: Any = None,
) -> Response:
    """The response that says ``message``; a request's field that it begins with is named."""
    response = json_response(_body(scope, status, message, code), status)
    response.headers.update(headers or {})
    return response


def without_folders(text: str) -> str:
    """A cause of the engine's, with the names of files but not their folders."""
    return _FOLDERS.sub("", text)


def _body(scope: MutableMapping[str, Any], status: int, message: str, code: Any = None) -> dict[str, Any]:
    if status >= 500:  # the others name what the client sent
        message = without_folders(message)
    message = message if len(message) <= _LONGEST else f"{message[:_LONGEST]}..."
    if scope["path"].startswith("/v1/messages"):
        return anthropic_error_body(status, message)
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    record = scope.get("graphllm")
    body = error_body(message, record.body if record is not None and status == 400 else None, kind)
    body["error"]["code"] = code
    return body


def describe(error: Exception) -> tuple[int, str, dict[str, str], str | None]:
    """Status, message, headers and code of what a route or the engine raised."""
    match error:
        case QueueFullError():
            return 429, str(error), {"Retry-After": str(error.retry_after)}, None
        case ConfigError() | RankCallError():
            return 400, str(error), {}, None
        case NotFoundError():
            return 404, str(error), {}, error.code
        case UnavailableError():
            return 503, str(error), {"Retry-After": str(error.retry_after)}, None
        case EngineDeadError() | EngineUnhealthyError():
            return 503, str(error), {"Retry-After": "5"}, None
        case SleepError():
            return 503, str(error), {"Retry-After": "5"}, None
        case EngineFailureError():
            # A constraint that only the engine could judge is a mistake of the request.
            return (400 if re.match(r"structured_outputs", str(error)) else 500), str(error), {}, None
        case SlowReaderError():
            return 408, str(error), {}, None
    return 500, "internal error: the server's log has it, under the id in x-request-id", {}, None


def event_body(scope: MutableMapping[str, Any], error: Exception) -> dict[str, Any]:
    """An error in the middle of a stream."""
    if not isinstance(error, KNOWN):
        _log.error("request %s failed", record_of(scope).id, exc_info=error)
    status, message, _, code = describe(error)
    return _body(scope, status, message, code)
