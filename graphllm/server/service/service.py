"""What the routes share: from the body of a request to a running call, within the limits of this server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from fastapi import Request

from graphllm.chat.call import (
    CHAT,
    CHAT_BATCH,
    MAX_COMPLETIONS,
    Call,
    check_priority,
    parse_call,
    rendered,
    write_out,
)
from graphllm.config import ConfigError
from graphllm.config.errors import ErrorPlace
from graphllm.config.server import ChatConfig
from graphllm.engine.process.template_trial import TemplateTrial
from graphllm.engine.requests.outputs import RequestOutput
from graphllm.engine.requests.processor import check_vocabulary
from graphllm.engine.requests.request import Adapter, CoreInfo
from graphllm.engine.requests.text import Tokenizer
from graphllm.entrypoints.adapters import LoRARequest
from graphllm.entrypoints.streaming.streams import merge
from graphllm.entrypoints.tracing import Tracing
from graphllm.server.http.errors import NotFoundError, UnavailableError
from graphllm.server.http.wire import Record, aside, cancelled, encode, record_of, while_there
from graphllm.server.service.adapters import ServedAdapter, resolvers
from graphllm.server.service.generation import News, Running, generate, paced
from graphllm.server.service.shared_state import Shared
from graphllm.server.supervision.engine_view import EngineView
from graphllm.server.supervision.metrics import Metrics

T = TypeVar("T")

_ANY = [{"role": "user", "content": "x"}]


@dataclass(frozen=True)
class Limits:
    """Of one request. body: bytes. prompts: of a completion. completions: n for each prompt, all together; beams: the
    same with use_beam_search. stops: stop strings; stop_length: characters of each. schema: bytes of a JSON schema.
    counted: tokens of a text that is only tokenized, or twice the context where that is more."""

    body: int = 32 << 20
    prompts: int = 1024
    completions: int = MAX_COMPLETIONS
    beams: int = 256
    stops: int = 64
    stop_length: int = 1024
    schema: int = 1 << 20
    counted: int = 1 << 16

    def check(self, call: Call, vocabulary: bool) -> None:
        """Raises ConfigError. vocabulary: this server gives log-probabilities of the whole vocabulary."""
        count, n, stop = len(call.prompts), call.params.n, call.params.stop
        if count > self.prompts:
            raise ConfigError(f"prompt has {count} entries: give at most {self.prompts}")
        if max(count, 1) * n > self.completions:
            raise ConfigError(f"n is {n}: give at most {self.completions} completions in one request")
        if call.beams is not None and call.beams.beam_width * max(count, 1) > self.beams:
            raise ConfigError(f"n is {n}: give at most {self.beams} beams in one request")
        if len(stop) > self.stops or any(len(s) > self.stop_length for s in stop):
            raise ConfigError(
                f"stop is {stop!r:.80}: give at most {self.stops} strings of at most {self.stop_length} characters"
            )
        constraint = call.params.structured_outputs
        if constraint is not None and (size := len(encode(constraint.json))) > self.schema:
            raise ConfigError(f"structured_outputs.json has {size} bytes: give at most {self.schema}")
        for name, wanted in (("logprobs", call.params.logprobs), ("prompt_logprobs", call.params.prompt_logprobs)):
            if wanted == -1 and not vocabulary:  # megabytes for every token, and time in which nobody else is served
                raise ConfigError(
                    f"{name} is -1: the whole vocabulary is for servers started with --max-logprobs -1; give a number"
                )


class Started(NamedTuple):
    """A call in the engine. news: nothing runs before its first output is asked for. model: the name of what answers,
    the model's or an adapter's."""

    call: Call
    news: AsyncGenerator[News, None]
    model: str


@dataclass(frozen=True)
class Service:
    """names: of the model, the first is its own.
    metrics: counters of this process.
    shared: state of all processes.
    keep_alive: seconds of silence in a stream after which a comment is sent, 0 for none.
    chat: how bodies are read and answers written.
    templates: renders chat templates of requests.
    resolvers: find adapters by their names.
    created: Unix time of the start.
    """

    supervisor: EngineView
    names: tuple[str, ...]
    metrics: Metrics
    shared: Shared
    limits: Limits = Limits()
    keep_alive: float = 15.0
    chat: ChatConfig = field(default_factory=ChatConfig)
    templates: TemplateTrial = field(default_factory=TemplateTrial)
    running: Running = field(default_factory=Running)
    tracing: Tracing | None = None
    resolvers: Sequence[Callable[[str], str | None]] = field(default_factory=resolvers)
    created: int = field(default_factory=lambda: int(time.time()))

    async def adapter(self, name: str | None) -> Adapter | None:
        """What a request means by its model: an adapter, or None for the model itself. Raises NotFoundError for a name
        that this server does not have, ConfigError for an adapter that it cannot serve."""
        if not name or name in self.names:
            return None
        served = await self.shared.adapters.find(name)
        found = served or await self._resolved(name)
        if found is None:
            raise NotFoundError(
                f"model is {name!r:.80}: not served here; give {' or '.join(map(repr, self.names))}", "model_not_found"
            )
        opened = await self.supervisor.engine.open_adapter(LoRARequest(name, lora_path=found.path))
        if served is None:
            await self.shared.adapters.put(found)
        return opened

    async def _resolved(self, name: str) -> ServedAdapter | None:
        """An adapter that an installed package knows; once it has been opened it is served."""
        if self.resolvers and self.info.adapted:
            for resolve in self.resolvers:
                if path := await asyncio.to_thread(resolve, name):
                    return ServedAdapter(name, str(path))
        return None

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ConfigError where there is none, UnavailableError while the model is not open."""
        opened = self.supervisor.opened
        if opened is None:
            raise UnavailableError("the engine is starting", 1)
        if opened.tokenizer is None:
            raise ConfigError("tokenizer: there is none; send token ids, or start without --skip-tokenizer-init")
        return opened.tokenizer

    @property
    def info(self) -> CoreInfo:
        """Sizes of the engine. Raises UnavailableError."""
        ready = self.supervisor.engine.ready
        assert ready is not None
        return ready.info

    def decode(self, field_name: str, ids: Sequence[int]) -> str:
        """The text of token ids. Raises ConfigError for those that there are not."""
        check_vocabulary(field_name, ids, self.info.vocab)
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    async def start(self, request: Request, url: str, body: Any) -> Started:
        """Raises what `describe` knows, before anything runs."""
        engine, record = self.supervisor.engine, record_of(request.scope)
        call, prompts = await self._aside(record, body, self._checked, url, body)
        adapter = await self.adapter(call.model)
        if call.request_id and not record.named:
            record.id = call.request_id
        news = generate(engine, call, prompts, record, self.metrics, self.running, self.tracing, adapter)
        news = paced(news, call.interval) if call.stream and call.interval > 1 else news
        return Started(call, news, self.names[0] if adapter is None else adapter.name)

    async def _aside(self, record: Record, body: dict[str, Any], work: Callable[..., T], *args: Any) -> T:
        """What ``work`` returns. A template of a request may take seconds, in which a thread waits for it."""
        if body.get("chat_template") is not None and self.chat.trust_request_chat_template:
            return await asyncio.to_thread(work, *args)
        return await aside(record, work, *args)

    def _checked(self, url: str, body: Any) -> tuple[Call, Sequence[Any]]:
        """What a body asks for, and its prompts."""
        if url == CHAT_BATCH:
            return self._batch(body)
        call, supervisor = self._parsed(url, body), self.supervisor
        texts = call.chat or call.echo or call.suffix or call.truncation or call.special is False
        return write_out(call, self.tokenizer, supervisor.style, self.templates) if texts else (call, call.prompts)

    def _parsed(self, url: str, body: Any) -> Call:
        supervisor = self.supervisor
        call = parse_call(url, body, supervisor.defaults, self.chat)
        self.limits.check(call, vocabulary=self.info.max_logprobs >= self.info.vocab)
        assert supervisor.opened is not None
        check_priority(call, supervisor.opened.config.scheduler)
        return call

    def _batch(self, body: dict[str, Any]) -> tuple[Call, Sequence[Any]]:
        """Several conversations, each a chat with what else the body says; they become the prompts of one call."""
        chats = body["messages"]
        if len(chats) > self.limits.prompts:
            raise ConfigError(f"messages has {len(chats)} conversations: give at most {self.limits.prompts}")
        for name in ("stream", "tools"):
            if body.get(name):
                raise ConfigError(f"{name} is {body[name]!r:.80}: not in a batch; leave it out")
        self._parsed(CHAT, {**body, "messages": _ANY})  # what is wrong with the other fields is no conversation's
        calls = []
        for i, chat in enumerate(chats):
            try:
                calls.append(self._checked(CHAT, {**body, "messages": chat}))
            except ConfigError as mistake:
                raise ErrorPlace("messages", i).error(mistake) from mistake
        first = calls[0][0]
        if len(chats) * first.params.n > self.limits.completions:
            raise ConfigError(
                f"n is {first.params.n}: give at most {self.limits.completions} completions in one request"
            )
        return first, [prompt for _, prompts in calls for prompt in prompts]

    async def whole(self, request: Request, started: Started) -> list[Any]:
        """The finished outputs, in the order of the prompts. Raises GoneError when the client leaves."""

        async def collect() -> list[Any]:
            found: dict[int, RequestOutput] = {}
            async for prompt, output in started.news:
                found[prompt] = merge(found.get(prompt), output)
            return [found[i] for i in range(len(found))]

        return await while_there(request, collect())

    async def conversation(self, record: Record, body: dict[str, Any]) -> str:
        """The text of the body of a chat, as the model would see it."""

        def write() -> str:
            supervisor = self.supervisor
            call = parse_call(CHAT, body, supervisor.defaults, self.chat)
            return rendered(call, self.tokenizer, self.templates)

        return await self._aside(record, body, write)

    async def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text that need not fit the context, for those who ask how long it is."""
        limit = max(2 * self.info.max_model_len, self.limits.counted)
        return await self.supervisor.engine.token_ids(text, limit, add_special_tokens)

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))


async def first_and_rest(request: Request, started: Started, patience: float) -> AsyncGenerator[News, None]:
    """The outputs of a streamed call, once the first one is there: what goes wrong before it still has a status of its
    own. patience: seconds after which there is nothing more to wait for, 0 for no end. Raises GoneError when the client
    leaves before."""
    first = asyncio.ensure_future(anext(started.news))
    try:
        await while_there(request, asyncio.wait({first}, timeout=patience or None))
        if first.done():
            first.result()
    except BaseException:
        await cancelled(first)
        raise

    async def rest() -> AsyncGenerator[News, None]:
        try:
            yield await first
            async for news in started.news:
                yield news
        finally:
            await cancelled(first)
            await started.news.aclose()

    return rest()
