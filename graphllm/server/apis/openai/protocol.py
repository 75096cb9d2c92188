"""Bodies of requests and of answers as the OpenAPI document shows them: names and types.

Bodies of requests are strict ("5" is no number); fields that are not here are refused by name, unless their value
changes nothing, and `parse_call` says what they mean. Answers are written as plain JSON of these shapes, so their
models do not run while serving; a test holds every answer against the document.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, create_model

from graphllm.chat.call import MAX_COMPLETIONS
from graphllm.config.parameter import parameters
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.server.http.bodies import Answer, Items, Object, bounded

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


class Body(Object):
    """What all bodies have in common."""

    model: str | None = Field(None, description="One of the names that /v1/models lists; left out: the first of them.")


def with_parameters(base: type[BaseModel], params: type) -> Any:
    """``base`` with the fields that requests have of a class of sampling parameters; none of them has to be given."""
    fields: dict[str, Any] = {
        d.name: (
            bounded(d.body) | None,
            Field(None, description=d.parameter.help, **cast(Any, d.parameter.bounds)),
        )
        for d in parameters(params).values()
        if d.body is not None
    }
    return create_model(base.__name__, __base__=base, **fields)


SamplingFields: Any = with_parameters(Body, SamplingParams)


class Sampling(SamplingFields):
    """Fields of `graphllm.SamplingParams`; None, and left out, mean the model's own default."""

    n: int | None = Field(None, ge=1, le=MAX_COMPLETIONS, description="Completions.")
    max_tokens: int | None = Field(None, ge=0, description="Tokens of output at most.")
    response_format: dict[str, Any] | None = Field(None, description="type: text, json_object or json_schema.")
    stream: bool | None = None
    stream_options: dict[str, Any] | None = Field(None, description="include_usage, continuous_usage_stats.")
    priority: Int64 | None = Field(None, description="Lower goes first, with --scheduling-policy priority.")
    cache_salt: str | None = Field(None, description="Only requests with the same salt share cached prompts.")
    return_token_ids: bool | None = Field(None, description="Show the token ids of prompt and output.")
    return_tokens_as_token_ids: bool | None = Field(None, description="In log-probabilities, tokens are token_id:ID.")
    truncate_prompt_tokens: Int64 | None = Field(
        None, description="Keep this many tokens of a prompt; -1 keeps all that fit."
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="Where it is cut; left by default.")
    stream_interval: Int64 | None = Field(None, ge=1, description="Tokens of a chunk.")
    use_beam_search: bool | None = Field(None, description="The n best sequences that a beam search of width n finds.")
    length_penalty: float | None = Field(None, description="Of a beam search.")
    request_id: str | None = Field(None, description="For the log, the answer's id and the header x-request-id.")
    add_special_tokens: bool | None = Field(None, description="Of the tokenizer, such as BOS; not in chats by default.")
    vllm_xargs: dict[str, Any] | None = Field(None, description="For your own logits processors.")
    kv_transfer_params: dict[str, Any] | None = Field(
        None, description="Of a request that two servers share, as a router for them writes it."
    )


class ChatMessage(BaseModel):
    """One message. content: text, or parts of type text."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: str | Items[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: Items[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatBody(Sampling):
    """POST /v1/chat/completions"""

    messages: Items[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, description="The newer name of max_tokens; it wins.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(
        None, ge=-1, description="Number of likeliest tokens at each position; -1 is the whole vocabulary."
    )
    tools: Items[dict[str, Any]] | None = Field(None, description="Functions, with JSON schemas of their arguments.")
    tool_choice: str | dict[str, Any] | None = Field(None, description="none, auto, required, or one function.")
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = Field(None, description="false leaves the reasoning out of the answer.")
    reasoning_effort: str | None = Field(None, description="For chat templates that know it.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template.")
    add_generation_prompt: bool | None = Field(None, description="false: no turn of the assistant is begun.")
    continue_final_message: bool | None = Field(None, description="The answer goes on with the last message.")
    chat_template: str | None = Field(None, description="In place of the model's, with --trust-request-chat-template.")
    documents: Items[dict[str, Any]] | None = Field(None, description="For chat templates that know them.")
    echo: bool | None = Field(None, description="The answer begins with the last message, if it is the assistant's.")
    return_prompt_text: bool | None = Field(None, description="Show the prompt as the model sees it.")


class ChatBatchBody(ChatBody):
    """POST /v1/chat/completions/batch: several conversations, one answer with the choices of all, in their order."""

    messages: Items[Items[ChatMessage]] = Field(min_length=1)  # type: ignore[assignment]


class CompletionBody(Sampling):
    """POST /v1/completions"""

    prompt: str | Items[int] | Items[str] | Items[Items[int]] = Field(description="Text or token ids, one or several.")
    echo: bool | None = Field(None, description="Put the prompt before the completion; max_tokens may be 0 then.")
    suffix: str | None = Field(None, description="Text after the gap, for models that fill gaps.")


class TokenizeBody(Body):
    """POST /tokenize: of a prompt, or of messages as the chat template writes them."""

    prompt: str | None = None
    messages: Items[ChatMessage] | None = None
    tools: Items[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize"""

    tokens: Items[int] = Field(max_length=1 << 19)


class Tokens(BaseModel):
    """Of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class ModelCard(BaseModel):
    """Of /v1/models."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "graphllm"
    root: str
    parent: str | None = None
    max_model_len: int | None = None


class ModelList(BaseModel):
    """GET /v1/models"""

    object: Literal["list"] = "list"
    data: list[ModelCard]


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
    role: str
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] = Field(default=[])
    reasoning_content: str = Field(default="", description="What a model that thinks in tags has thought.")
    reasoning: str = Field(default="", description="The same text, under its newer name.")


class ChatChoice(Answer):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "repetition", "abort"]
    stop_reason: str | int | None = Field(description="The stop string or stop token, if one was met.")
    token_ids: list[int] = Field(default=[])


class ChatCompletion(Answer):
    """Of /v1/chat/completions"""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBlock
    prompt_logprobs: PromptLogprobs = Field(default=[])
    prompt_token_ids: list[int] = Field(default=[])
    prompt_text: str = Field(default="")
    kv_transfer_params: dict[str, Any] = Field(default={}, description="For the server that goes on.")


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "repetition", "abort"]
    stop_reason: str | int | None = Field(description="The stop string or stop token, if one was met.")
    prompt_logprobs: PromptLogprobs = Field(default=[])
    token_ids: list[int] = Field(default=[])
    prompt_token_ids: list[int] = Field(default=[])


class Completion(Answer):
    """Of /v1/completions"""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBlock
    kv_transfer_params: dict[str, Any] = Field(default={}, description="For the server that goes on.")


class Detokenized(Answer):
    """Of /detokenize"""

    prompt: str
