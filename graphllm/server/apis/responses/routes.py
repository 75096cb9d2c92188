"""Routes of OpenAI's Responses API: create, also as a stream or in the background; retrieve, cancel, delete."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from graphllm.chat.call import CHAT
from graphllm.chat.reading import Reading
from graphllm.chat.replies import Ending
from graphllm.config import ConfigError
from graphllm.server.apis.responses import requests
from graphllm.server.apis.responses.events import ResponseWriter
from graphllm.server.apis.responses.protocol import Deleted, InputItems, ResponseObject
from graphllm.server.apis.responses.requests import Chat, ResponsesRequest
from graphllm.server.apis.responses.truncation import fitting
from graphllm.server.http.document import GENERATES, answers, errors
from graphllm.server.http.errors import NotFoundError, describe, event_body
from graphllm.server.http.wire import EventStream, JsonRoute, json_response, named_event, record_of
from graphllm.server.service.generation import News
from graphllm.server.service.service import Service, Started, first_and_rest
from graphllm.server.service.stored_responses import Responses, StoredResponse

_EVENTS = "each is `event:` with its type and `data:` with the event as JSON"


def responses_routes(service: Service) -> APIRouter:
    """The routes, for one service. What they keep is in memory, and goes with the server."""
    router = APIRouter(route_class=JsonRoute, tags=["OpenAI Responses"])
    _add_create(router, service, service.shared.responses)
    _add_kept(router, service.shared.responses)
    return router


def _add_create(router: APIRouter, service: Service, store: Responses) -> None:
    """The route that makes a response."""

    @router.post("/v1/responses", responses=answers(ResponseObject, _EVENTS) | errors(*GENERATES))
    async def create(body: ResponsesRequest, request: Request) -> Response:
        """The answer to text or items, maybe as a continuation of an earlier response."""
        given = record_of(request.scope).body
        earlier = await _earlier(store, given.get("previous_response_id"))
        asked = requests.to_chat(given, earlier, service.chat.strict_fields)
        if given.get("truncation") == "auto":
            asked["messages"] = await _fitting(service, request, asked)
        started = await service.start(request, CHAT, asked)
        # Not the id of the request, which others may guess.
        id = f"resp_{secrets.token_hex(16)}"
        name = started.call.model or service.names[0]
        writer = ResponseWriter(id, int(time.time()), name, given, started.call.params)
        reading = Reading(started.call, service.count)
        chat = requests.conversation(given, earlier)

        async def keep(task: asyncio.Task[None] | None = None) -> None:
            if given.get("store") is not False:
                conversation, items = [*chat, *writer.conversation()], requests.input_items(given, id)
                await store.put(id, StoredResponse(writer.body(), conversation, items, task is not None), task)

        if given.get("background"):
            if started.call.stream or given.get("store") is False:
                raise ConfigError(
                    "background is True: give it without stream and store: false; ask for the response later"
                )
            task = asyncio.create_task(_in_background(request, writer, reading, started, keep))
            await keep(task)
            return json_response(writer.body())
        if started.call.stream:
            news = await first_and_rest(request, started, service.keep_alive)
            return EventStream(_events(request, writer, reading, news, keep), service.keep_alive)
        (output,) = await service.whole(request, started)
        writer.start()
        writer.parts(reading.read(output), reading.logprobs(output))
        writer.end(reading.ending)
        await keep()
        return json_response(writer.body())


def _add_kept(router: APIRouter, store: Responses) -> None:
    """The routes of responses that are kept."""

    @router.get("/v1/responses/{id}", responses=answers(ResponseObject) | errors(400, 401, 404))
    async def retrieve(id: str, stream: bool = False) -> Response:
        """A response that is kept; one that runs in the background as far as it is there."""
        if stream:
            raise ConfigError("stream is True: the events of a response are not kept; leave it out, and ask again")
        return json_response((await _kept(store, id)).body)

    @router.get("/v1/responses/{id}/input_items", responses=answers(InputItems) | errors(400, 401, 404))
    async def input_items(
        id: str,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """What a response was asked with."""
        items = (await _kept(store, id)).input
        items = items if order == "asc" else items[::-1]
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise ConfigError(
                    f"after is {after!r:.80}: no item of this response; give the id of one, or leave it out"
                )
            items = items[ids.index(after) + 1 :]
        page = items[:limit]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        return json_response(
            {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(items) > limit}
        )

    @router.post("/v1/responses/{id}/cancel", responses=answers(ResponseObject) | errors(400, 401, 404))
    async def cancel(id: str) -> Response:
        """End a response that runs in the background."""
        record = await _kept(store, id)
        if not record.body.get("background"):
            raise ConfigError(f"response_id is {id!r:.80}: only responses made with background: true can be cancelled")
        await store.end(id)
        return json_response((await _kept(store, id)).body)

    @router.delete("/v1/responses/{id}", responses=errors(401, 404))
    async def delete(id: str) -> Deleted:
        """Forget a response; one that runs ends."""
        await _kept(store, id)
        await store.end(id)
        await store.remove(id)
        return Deleted(id=id, object="response", deleted=True)


async def _kept(store: Responses, id: str) -> StoredResponse:
    record = await store.get(id)
    if record is None:
        raise NotFoundError(f"response_id is {id!r:.80}: no such response is kept here", "response_not_found")
    return record


async def _earlier(store: Responses, id: str | None) -> Chat:
    if id is None:
        return []
    record = await store.get(id)
    if record is None:
        raise NotFoundError(f"previous_response_id is {id!r:.80}: no such response is kept here", "response_not_found")
    if record.running:
        raise ConfigError(f"previous_response_id is {id!r:.80}: it still runs; wait for its end")
    return record.conversation


async def _fitting(service: Service, request: Request, chat: dict[str, Any]) -> Chat:
    """The messages of a chat that fit the context."""
    record, info = record_of(request.scope), service.info
    room = min(info.max_model_len, info.capacity)

    async def fits(messages: Chat, wanted: int) -> bool:
        text = await service.conversation(record, {**chat, "messages": messages})
        try:
            return len(await service.encode(text)) + wanted <= room
        except ConfigError:  # it is far too long
            return False

    return await fitting(chat["messages"], chat.get("max_tokens", 1), fits)


async def _in_background(
    request: Request, writer: ResponseWriter, reading: Reading, started: Started, keep: Any
) -> None:
    try:
        writer.start()
        async with contextlib.aclosing(started.news) as stream:
            async for news in stream:
                writer.parts(reading.read(news.output), reading.logprobs(news.output))
        writer.end(reading.ending)
    except asyncio.CancelledError:
        writer.cancelled()
        raise
    except Exception as error:
        event_body(request.scope, error)  # logs what is no mistake of the request
        writer.end(Ending("error", reading.usage, error=describe(error)[1]))
    finally:
        await keep()


async def _events(
    request: Request, writer: ResponseWriter, reading: Reading, stream: AsyncGenerator[News, None], keep: Any
) -> AsyncGenerator[bytes, None]:
    done = False

    async def end(ending: Ending) -> list[dict[str, Any]]:
        # Kept before the client hears of the end: its next request may go on from here.
        nonlocal done
        done = True
        events = writer.end(ending)
        await keep()
        return events

    try:
        events = writer.start()
        async for news in stream:
            events += writer.parts(reading.read(news.output), reading.logprobs(news.output))
            if news.output.finished:
                events += await end(reading.ending)
            if events:
                yield b"".join(map(named_event, events))
            events = []
    except Exception as error:
        event_body(request.scope, error)  # logs what is no mistake of the request
        yield b"".join(map(named_event, await end(Ending("error", reading.usage, error=describe(error)[1]))))
    finally:
        if not done:  # the client has left
            writer.cancelled()
            await keep()
        await stream.aclose()
