"""Bodies of answers of the Messages API as the OpenAPI document shows them. They are written as plain JSON of these
shapes, so nothing here runs while serving; a test holds every answer against the document."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from graphllm.server.http.bodies import Answer


class ContentBlock(BaseModel):
    """Text, thinking, or the use of a tool, with the fields of its type."""

    type: Literal["text", "thinking", "tool_use"]


class MessageUsage(Answer):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int]


class MessageObject(Answer):
    """Of /v1/messages"""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class InputTokens(Answer):
    """Of /v1/messages/count_tokens"""

    input_tokens: int


class AnthropicErrorDetail(Answer):
    type: str
    message: str


class AnthropicError(Answer):
    """Every error of Anthropic's routes."""

    type: Literal["error"]
    error: AnthropicErrorDetail
