"""The OpenAPI document of routes, bodies apart: their errors, and the answers that can come as events."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

Responses = dict[int | str, dict[str, Any]]

_ERRORS = {
    400: "A field of the request is wrong; the message names it",
    401: "The key is missing or wrong",
    403: "The key is not an admin's",
    404: "There is no such thing here; the message says what",
    408: "The body did not come in time",
    413: "The body is too large",
    429: "Too many requests wait",
    503: "The engine takes no requests now; the message says why",
}
READS = (400, 401, 404, 408, 413, 503)  # a route that reads a body
GENERATES = (*READS, 429)
METRICS: Responses = {
    200: {"content": {kind: {"schema": {"type": "string"}} for kind in ("text/plain", "application/openmetrics-text")}}
}


class ErrorDetail(BaseModel):
    """message: for people. param: the field of the request that is at fault."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorBody(BaseModel):
    """Every error."""

    error: ErrorDetail


def errors(*statuses: int, body: type[BaseModel] = ErrorBody) -> Responses:
    """The errors of a route."""
    listed: Responses = {status: {"model": body, "description": _ERRORS[status]} for status in statuses}
    # FastAPI would add a 422 of its own, which no route answers with, where nothing is said of the others.
    return listed | {"4XX": {"model": body, "description": "Another mistake in the request, such as its method"}}


def answers(body: type[BaseModel], events: str = "") -> Responses:
    """The answer of a route. events: what they are, for one that can stream."""
    if not events:
        return {200: {"model": body}}
    text = f"The answer; with stream: true as server-sent events, {events}"
    return {200: {"model": body, "description": text, "content": {"text/event-stream": {}}}}
