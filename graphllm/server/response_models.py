"""Bodies of responses as the OpenAPI document shows them. The writers make plain JSON of these shapes, so nothing here
runs while serving; a test holds every answer against the document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    """What has no other fields than these."""

    model_config = ConfigDict(extra="forbid")


class TokenLogprob(Answer):
    """bytes: the token's text in UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    content: list[ChosenLogprob]
    refusal: None


class CompletionLogprobs(Answer):
    """A list each with an entry for every token; null where a prompt begins."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(Answer):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; null for the first token


class CachedTokens(Answer):
    cached_tokens: int


class ReasoningTokens(Answer):
    reasoning_tokens: int


class UsageBlock(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens = Field(default=ReasoningTokens(reasoning_tokens=0))


class CalledFunction(Answer):
    """arguments: JSON text, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] = Field(default=[])
    reasoning_content: str = Field(default="", description="What a model that thinks in tags has thought.")
    reasoning: str = Field(default="", description="The same text, under its newer name.")


class ChatChoice(Answer):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None = Field(description="The stop string or stop token, if one was met.")


class ChatCompletion(Answer):
    """Of /v1/chat/completions"""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBlock
    prompt_logprobs: PromptLogprobs = Field(default=[])


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None = Field(description="The stop string or stop token, if one was met.")
    prompt_logprobs: PromptLogprobs = Field(default=[])


class Completion(Answer):
    """Of /v1/completions"""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBlock


class Text(Answer):
    """Of /detokenize"""

    prompt: str


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


class Deleted(Answer):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


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


class Version(Answer):
    version: str


class Load(Answer):
    server_load: int
