"""Routes of OpenAI's API, and the tokenizer's: chat, completions, tokenize, detokenize."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError

from graphllm.chat import answers
from graphllm.chat.call import CHAT, CHAT_BATCH, COMPLETIONS
from graphllm.chat.fields import judged
from graphllm.config import ConfigError
from graphllm.server.apis.openai.protocol import (
    ChatBatchBody,
    ChatBody,
    ChatCompletion,
    Completion,
    CompletionBody,
    DetokenizeBody,
    Detokenized,
    TokenizeBody,
    Tokens,
)
from graphllm.server.http.bodies import fields
from graphllm.server.http.document import GENERATES, READS, errors
from graphllm.server.http.document import answers as made
from graphllm.server.http.errors import event_body
from graphllm.server.http.wire import EventStream, JsonRoute, Record, aside, event, json_response, record_of
from graphllm.server.service.generation import News
from graphllm.server.service.service import Service, first_and_rest

_CHUNKS = "each is `data:` and a chunk as JSON, the last one `data: [DONE]`"


def openai_routes(service: Service) -> APIRouter:
    """The routes, for one service."""
    router = APIRouter(route_class=JsonRoute)

    @router.post(CHAT, tags=["OpenAI"], responses=made(ChatCompletion, _CHUNKS) | errors(*GENERATES))
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """The next message of a conversation; with stream: true as server-sent events."""
        return await answer(service, request, CHAT)

    @router.post(CHAT_BATCH, tags=["OpenAI"], responses=made(ChatCompletion) | errors(*GENERATES))
    async def batch(body: ChatBatchBody, request: Request) -> Response:
        """The next messages of several conversations; the messages of conversation i begin with choice i times n."""
        return await answer(service, request, CHAT_BATCH)

    @router.post("/invocations", tags=["OpenAI"], responses=errors(*GENERATES))
    async def invocations(body: dict[str, Any], request: Request) -> Response:
        """For SageMaker: a chat where there are messages, else a completion."""
        kind, url = (ChatBody, CHAT) if "messages" in body else (CompletionBody, COMPLETIONS)
        try:
            kind.model_validate(body)
        except ValidationError as wrong:
            raise RequestValidationError([{**e, "loc": ("body", *e["loc"])} for e in wrong.errors()]) from wrong
        return await answer(service, request, url)

    @router.post(COMPLETIONS, tags=["OpenAI"], responses=made(Completion, _CHUNKS) | errors(*GENERATES))
    async def completions(body: CompletionBody, request: Request) -> Response:
        """The continuation of one or several prompts; with stream: true as server-sent events."""
        return await answer(service, request, COMPLETIONS)

    @router.post("/tokenize", tags=["Tokenizer"], response_model_exclude_none=True, responses=errors(*READS))
    async def tokenize(body: TokenizeBody, request: Request) -> Tokens:
        """Token ids of a prompt, or of messages as the chat template writes them."""
        await service.adapter(body.model)
        record = record_of(request.scope)
        ids = await service.encode(*await _text(service, record))
        texts = await aside(record, _texts, service, ids) if record.body.get("return_token_strs") else None
        return Tokens(count=len(ids), max_model_len=service.info.max_model_len, tokens=ids, token_strs=texts)

    @router.post("/detokenize", tags=["Tokenizer"], responses=errors(*READS))
    async def detokenize(body: DetokenizeBody, request: Request) -> Detokenized:
        """The text of token ids."""
        await service.adapter(body.model)
        record = record_of(request.scope)
        fields(record.body, "", DetokenizeBody.model_fields)  # there are no others
        return Detokenized(prompt=await aside(record, service.decode, "tokens", body.tokens))

    return router


def _texts(service: Service, ids: list[int]) -> list[str]:
    return [service.tokenizer.decode([i], skip_special_tokens=False) for i in ids]


async def _text(service: Service, record: Record) -> tuple[str, bool]:
    """What is to be tokenized, and whether special tokens are added."""
    given = judged(record.body, strict=service.chat.strict_fields)
    for name in ("model", "return_token_strs"):
        given.pop(name, None)
    if ("prompt" in given) == ("messages" in given):
        raise ConfigError(f"prompt is {given.get('prompt')!r:.80}: give either prompt or messages")
    if "prompt" in given:
        special = given.pop("add_special_tokens", True)
        if len(given) > 1:
            name = next(name for name in given if name != "prompt")
            raise ConfigError(f"{name} is {given[name]!r:.80}: not supported with a prompt; leave it out")
        return given["prompt"], special
    return await service.conversation(record, given), given.get("add_special_tokens", False)


async def answer(service: Service, request: Request, url: str) -> Response:
    """To the body of a chat or a completion."""
    record = record_of(request.scope)
    started = await service.start(request, url, record.body)
    call, about = started.call, (record.id, started.model, int(time.time()))
    if call.stream:
        writer = answers.ChunkWriter(call, *about, service.count)
        news = await first_and_rest(request, started, service.keep_alive)
        return EventStream(_chunks(request, writer, news), service.keep_alive)
    outputs = await service.whole(request, started)
    return json_response(answers.response_body(call, outputs, *about, service.count))


async def _chunks(
    request: Request, writer: answers.ChunkWriter, stream: AsyncGenerator[News, None]
) -> AsyncGenerator[bytes, None]:
    try:
        async for news in stream:
            chunks = writer.write(news.prompt, news.output)
            if chunks:
                yield b"".join(map(event, chunks))
        yield b"".join(map(event, writer.last())) + b"data: [DONE]\n\n"
    except Exception as error:
        yield event(event_body(request.scope, error))
    finally:
        await stream.aclose()
