"""Bodies of answers of the Responses API as the OpenAPI document shows them. They are written as plain JSON of these
shapes, so nothing here runs while serving; a test holds every answer against the document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from graphllm.server.http.bodies import Answer


class ResponseError(Answer):
    code: str
    message: str


class Incomplete(Answer):
    reason: Literal["max_output_tokens"]


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class OutputItem(BaseModel):
    """A message, reasoning, or the call of a function, with the fields of its type."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]


class ResponseObject(BaseModel):
    """A response of the Responses API. What the request said comes with it."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseError | None
    incomplete_details: Incomplete | None
    output: list[OutputItem]
    usage: ResponseUsage | None
    background: bool
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]


class InputItems(Answer):
    """A page of the items that a response was asked with."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(Answer):
    id: str
    object: Literal["response"]
    deleted: Literal[True]
