"""Routes of Anthropic's API: messages, and how many tokens they are."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from fastapi.responses import Response

from graphllm.chat.call import CHAT
from graphllm.chat.reading import Reading
from graphllm.server.apis.anthropic import requests
from graphllm.server.apis.anthropic.events import MessageWriter
from graphllm.server.apis.anthropic.protocol import AnthropicError, InputTokens, MessageObject
from graphllm.server.http.document import READS, answers, errors
from graphllm.server.http.errors import event_body
from graphllm.server.http.wire import EventStream, JsonRoute, json_response, named_event, record_of
from graphllm.server.service.generation import News
from graphllm.server.service.service import Service, first_and_rest

_EVENTS = "each is `event:` with its type and `data:` with the event as JSON"
_PING = named_event({"type": "ping"})


def anthropic_routes(service: Service) -> APIRouter:
    """The routes, for one service."""
    router = APIRouter(route_class=JsonRoute, tags=["Anthropic"], responses=errors(*READS, body=AnthropicError))

    @router.post("/v1/messages", responses=answers(MessageObject, _EVENTS) | errors(429, body=AnthropicError))
    async def messages(body: requests.MessagesRequest, request: Request) -> Response:
        """The next message of a conversation; with stream: true as server-sent events."""
        record = record_of(request.scope)
        started = await service.start(request, CHAT, requests.to_chat(record.body, service.chat.strict_fields))
        reading = Reading(started.call, service.count)
        name = started.call.model or service.names[0]
        writer = MessageWriter(f"msg_{record.id}", name, requests.omits_thinking(record.body))
        if started.call.stream:
            news = await first_and_rest(request, started, service.keep_alive)
            return EventStream(
                _events(request, writer, reading, news), service.keep_alive, named_event({"type": "ping"})
            )
        (output,) = await service.whole(request, started)
        parts = reading.read(output)
        writer.start(reading.usage)
        writer.parts(parts)
        writer.end(reading.ending)
        return json_response(writer.body())

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: requests.CountTokensRequest, request: Request) -> InputTokens:
        """Tokens of the prompt that these messages make."""
        await service.adapter(body.model)
        record = record_of(request.scope)
        text = await service.conversation(record, requests.count_to_chat(record.body, service.chat.strict_fields))
        return InputTokens(input_tokens=len(await service.encode(text)))

    return router


async def _events(
    request: Request, writer: MessageWriter, reading: Reading, stream: AsyncGenerator[News, None]
) -> AsyncGenerator[bytes, None]:
    begun = False
    try:
        async for news in stream:
            parts = reading.read(news.output)
            events = [] if begun else writer.start(reading.usage._replace(completion=0))
            begun = True
            events += writer.parts(parts)
            if news.output.finished:
                events += writer.end(reading.ending)
            if events:
                yield b"".join(map(named_event, events))
    except Exception as error:
        yield named_event(event_body(request.scope, error))
    finally:
        await stream.aclose()
