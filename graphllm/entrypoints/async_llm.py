"""AsyncLLM: requests as asynchronous streams, from an engine core in its own process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import itertools
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

from graphllm.config import ConfigError, EngineArgs
from graphllm.config.requests.pooling_params import Vectors
from graphllm.config.requests.sampling_params import RequestOutputKind, SamplingParams
from graphllm.engine.process.core_client import CoreClient, Health
from graphllm.engine.process.core_group import CoreGroup, Lost
from graphllm.engine.process.limited_process import MAX_WAITING
from graphllm.engine.process.messages import CoreLoad, DeathCause, EngineDeadError, Ready, Rejected, Updates
from graphllm.engine.process.remote_core import RemoteCore
from graphllm.engine.process.spawn import Child
from graphllm.engine.requests.outputs import CompletionOutput, OutputProcessor, Processed, RequestOutput
from graphllm.engine.requests.processor import GrammarChecker, ParsedRequest, Processor, Prompt
from graphllm.engine.requests.request import Adapter, CoreInfo, CoreStats, EngineCoreOutput, QueueFullError
from graphllm.engine.requests.text import Tokenizer
from graphllm.engine.requests.text_length import PIECE, encode_at_most
from graphllm.engine.vectors.pooling import Pooling
from graphllm.entrypoints.adapters import AdapterFiles, LoRARequest
from graphllm.entrypoints.async_pooling import PooledRequests, PoolingAsyncMixin
from graphllm.entrypoints.stat_loggers import SECONDS, LoggingStatLogger, StatLogger, StatLoggerFactory, tell
from graphllm.entrypoints.stat_loggers import stat_loggers as stat_loggers_of
from graphllm.entrypoints.tracing import TracedRequest, Tracing
from graphllm.entrypoints.vllm_config import VllmConfig
from graphllm.loading.artifact.model import ResolvedModel, grammar_maker, resolve_model
from graphllm.loading.core.core_clients import core_client
from graphllm.runtime.commands.calls import PROFILE_PREFIX, START_PROFILE, STOP_PROFILE, call_of

_SLICE = 128  # updates detokenized before the event loop gets a turn
_LONG = 4096  # characters of a prompt above which it is tokenized in a thread
# Tokens and log-probabilities, of some 200 bytes each, that wait for their readers together; when there are more,
# those end who have taken nothing for so many seconds, who have most first.
UNREAD, _UNREAD_SECONDS = 1 << 18, 5.0
_VECTORS = Vectors()


class EngineUnhealthyError(RuntimeError):
    """The core lives, but is silent or stuck in a step; ``health`` says which."""

    def __init__(self, health: Health) -> None:
        super().__init__(f"the engine core is {health.state} for {health.seconds:.1f} s")
        self.health = health


class SlowReaderError(RuntimeError):
    """Nobody took a stream's outputs, and there is no room for more."""


class AsyncLLM(PoolingAsyncMixin):
    """Serves an engine, of one core or several, to one event loop. It starts with `start`, or with the first
    request."""

    def __init__(
        self,
        client: CoreClient | RemoteCore | CoreGroup,
        tokenizer: Tokenizer | None,
        grammar: Callable[[CoreInfo], GrammarChecker] | None = None,
        seed: int | None = None,
        loggers: Sequence[StatLogger] = (),
        unread: int = UNREAD,
        tracing: Tracing | None = None,
        vectors: Vectors = _VECTORS,
    ) -> None:
        """client: not started yet. grammar: makes the checker once the core's vocabulary is known. loggers: told of
        the core's figures every ten seconds. unread: tokens and log-probabilities that may wait for their readers.
        tracing: gets a span of each request. vectors: as for `Pooling`. The others: as for `Processor`."""
        self._client, self._tokenizer, self._grammar, self._seed = client, tokenizer, grammar, seed
        self._most_unread, self._tracing = unread, tracing
        self._outputs = OutputProcessor(tokenizer)
        self._processor: Processor | None = None
        self._vectors = vectors
        self._pooling: Pooling | None = None
        self._pooled = PooledRequests()
        self._adapters: AdapterFiles | None = None
        # More than can wait for the check of a large grammar, so that others never do.
        self._parsers = concurrent.futures.ThreadPoolExecutor(2 * MAX_WAITING, "graphllm-parse")
        self._starting: asyncio.Task[None] | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._loggers = loggers
        self._teller: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._names: dict[str, str] = {}  # what the core calls a request: it may not hear of the end of one in time
        self._streams: dict[str, _Stream] = {}  # by that name
        self._long_texts = ThreadPoolExecutor(1, "long-texts")  # one for all: their owners take turns at each piece
        self._cause: DeathCause | None = None

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
    ) -> AsyncLLM:
        """Find the model and its artifact, which is built when the policy says so; `start`, or the first request, then
        loads it in a process of its own. stat_loggers: made and told in place of the line in the log. The others change
        nothing. Raises ConfigError."""
        tracing = Tracing(engine_args.otlp_traces_endpoint) if engine_args.otlp_traces_endpoint else None
        loggers = stat_loggers_of(engine_args, stat_loggers)
        return cls.from_resolved(resolve_model(engine_args), engine_args.seed, loggers=loggers, tracing=tracing)

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: VllmConfig,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        enable_log_requests: bool = False,
        disable_log_stats: bool = False,
    ) -> AsyncLLM:
        """The same from what `EngineArgs.create_engine_config` has given. enable_log_requests: changes nothing."""
        args = vllm_config.engine_args
        args = replace(args, disable_log_stats=True) if disable_log_stats else args
        return cls.from_engine_args(args, stat_loggers=stat_loggers)

    @classmethod
    def from_resolved(
        cls,
        resolved: ResolvedModel,
        seed: int | None,
        unresponsive: float = 10.0,
        stuck: float = 60.0,
        children: Sequence[Child] = (),
        loggers: Sequence[StatLogger] | None = None,
        tracing: Tracing | None = None,
    ) -> AsyncLLM:
        """An engine for a model that is found. loggers: None for the line in the log, where it is not disabled. The
        others: as for `core_client`. Raises ConfigError."""
        if resolved.processors:
            raise ConfigError(
                f"logits_processors has {resolved.processors[0]!r}: functions cannot cross to the engine's process; "
                'give "package.module:name"'
            )
        client = core_client(resolved.config, unresponsive, stuck, children)
        if loggers is None:
            loggers = [] if resolved.config.log.disable_log_stats else [LoggingStatLogger()]
        return cls(
            client,
            resolved.tokenizer,
            grammar_maker(resolved),
            seed,
            loggers,
            tracing=tracing,
            vectors=resolved.vectors,
        )

    @classmethod
    def beside(cls, core: RemoteCore | CoreGroup, resolved: ResolvedModel, seed: int | None, unread: int) -> AsyncLLM:
        """One more front of an engine that another one has started. seed: another one than its."""
        return cls(core, resolved.tokenizer, grammar_maker(resolved), seed, unread=unread, vectors=resolved.vectors)

    async def start(self) -> None:
        """Wait until the core is loaded. Raises ConfigError for settings that cannot be, EngineDeadError."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)  # others may wait for it too

    async def _start(self) -> None:
        info = (await self._client.start()).info
        grammar = self._grammar(info) if self._grammar else None
        self._processor = Processor(self._tokenizer, info, grammar, self._seed)
        self._pooling = Pooling(self._processor, self._tokenizer, info, self._vectors)
        self._adapters = AdapterFiles(info)
        self._receiver = asyncio.create_task(self._receive())
        if self._loggers:
            self._teller = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        """Tell the loggers, until the engine is gone for good."""
        while True:
            await asyncio.sleep(SECONDS)
            try:
                await self.do_log_stats()
            except EngineDeadError:
                if not isinstance(self._client, CoreGroup) or self._client.closed:
                    return

    async def do_log_stats(self) -> None:
        """Tell the loggers now. Raises EngineDeadError."""
        tell(self._loggers, await self.stats())

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        adapter: Adapter | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a request as they come; leaving the stream early aborts it. adapter: one that `open_adapter`
        gave, in place of a lora_request.

        Outputs that nobody has taken yet are merged into one. Raises ConfigError for a request that cannot run,
        QueueFullError when too many wait, EngineDeadError when the core is dead or dies.
        """
        if self._processor is None:
            await self.start()
        if lora_request is not None:
            adapter = await self.open_adapter(lora_request)
        if request_id in self._names:
            raise ConfigError(f"request_id: {request_id!r} is already running; ids must be unique")
        self._names[request_id] = name = f"{request_id}-{next(self._numbers)}"
        try:
            parsed = await self._parse(prompt, sampling_params, name, priority, cache_salt, adapter)
            stream = self._streams[name] = _Stream(parsed)
            if self._cause is not None:
                raise EngineDeadError(self._cause)
            self._client.add(parsed.requests)
            self._outputs.add(parsed)
            trace = TracedRequest(self._tracing, request_id, parsed.params, trace_headers) if self._tracing else None
            finished = False
            while not finished:
                output = await stream.get()
                output.request_id, finished = request_id, output.finished
                if trace is not None:
                    trace.take(output)
                yield output
        finally:
            del self._names[request_id]
            if (left := self._streams.pop(name, None)) is not None:
                left.drop()
            self._abort_core(self._outputs.abort([name]))

    async def _parse(
        self,
        prompt: Prompt,
        params: SamplingParams,
        name: str,
        priority: int,
        cache_salt: str | None,
        adapter: Adapter | None,
    ) -> ParsedRequest:
        prompt = await self.tokenized(prompt)
        assert self._processor is not None
        make = functools.partial(
            self._processor.make, prompt, params, name, priority=priority, cache_salt=cache_salt, adapter=adapter
        )
        if params.structured_outputs is None and not params.bad_words:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self._parsers, make)

    async def open_adapter(self, request: LoRARequest) -> Adapter:
        """Read and check an adapter's files, beside what is served. Raises ConfigError."""
        if self._adapters is None:
            await self.start()
        assert self._adapters is not None
        return cast(Adapter, await asyncio.to_thread(self._adapters.requested, request))

    async def tokenized(self, prompt: Prompt) -> Prompt:
        """A prompt with its token ids, if it is text that takes a while to tokenize; else as it is. Raises ConfigError
        for one that is far too long."""
        if self._processor is None:
            await self.start()
        assert self._processor is not None
        fields: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
        text = fields.get("prompt")
        if not isinstance(text, str) or len(text) <= _LONG or fields.get("prompt_token_ids") is not None:
            return prompt
        steps = self._processor.encode(text, fields.get("add_special_tokens", True), "truncation" in fields)
        return {**fields, "prompt_token_ids": await self._in_turns(text, steps)}

    async def token_ids(self, text: str, limit: int, add_special_tokens: bool = True) -> list[int]:
        """Token ids of any text. Raises ConfigError for one with far more than ``limit``."""
        if self._tokenizer is None:
            raise ConfigError("tokenizer: there is none; leave out skip_tokenizer_init, or work with token ids")
        return await self._in_turns(text, encode_at_most(self._tokenizer, text, limit, add_special_tokens))

    async def _in_turns(self, text: str, steps: Iterator[list[int] | None]) -> list[int]:
        """The last of the steps of ``text``, each in a thread; nothing goes on behind one when this is cancelled."""
        executor = self._long_texts if len(text) > PIECE else None
        while (ids := await asyncio.get_running_loop().run_in_executor(executor, next, steps)) is None:
            pass
        return ids

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their streams end with finish_reason "abort". Ids that are not running are ignored."""
        ids = [request_id] if isinstance(request_id, str) else request_id
        names = [self._names[id] for id in ids if id in self._names]
        streams = [self._streams[name] for name in names if name in self._streams]
        pooled = [name for name in names if name in self._pooled]
        self._abort_core([r.id for stream in streams for r in stream.parsed.requests] + pooled)

    def finish(self, request_id: str, index: int) -> None:
        """End one completion of a running request as a stop string does: its text is all there is. Of a request whose
        outputs come as they are made."""
        self._give_out(self._outputs.finish(self._names.get(request_id, ""), index))

    @property
    def ready(self) -> Ready | None:
        """What the core said of itself once it was loaded: sizes, and the seconds of each phase. None before."""
        return self._client.ready

    @property
    def folders(self) -> list[str]:
        """Of each core's sockets, for fronts `beside` this one; once it is started."""
        return self._client.folders

    @property
    def unfinished(self) -> int:
        """Requests whose streams are open."""
        return len(self._names) + len(self._pooled)

    @property
    def is_running(self) -> bool:
        """Started, and neither dead nor shut down."""
        return self._processor is not None and self.health().state != "dead"

    @property
    def errored(self) -> bool:
        """The core died; a shut down one did not."""
        return self.dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """What every stream raises, if the core died."""
        cause = self.health().cause
        return None if cause is None or cause.kind == "closed" else EngineDeadError(cause)

    def health(self) -> Health:
        """The state of the core, without asking it."""
        health = self._client.health()
        return health if self._cause is None else Health("dead", health.seconds, self._cause)

    def healths(self) -> list[Health]:
        """The state of each core."""
        return self._client.healths()

    async def restart(self, engine: int) -> None:
        """Put another core in the place of one of several, whose requests fail if they have not. Raises what its start
        raises."""
        assert isinstance(self._client, CoreGroup)
        await self._client.restart(engine)

    def lose(self, engine: int, cause: DeathCause) -> None:
        """One of several cores does not answer any more, as another process knows; its requests fail."""
        assert isinstance(self._client, CoreGroup)
        self._client.lose(engine, cause)

    def fail_requests(self, error: Exception, engine: int | None = None) -> int:
        """End streams with this error, those of one core of several or all, for a core that does not answer; how many.
        It is told to abort them."""
        ids = None
        if engine is not None:
            assert isinstance(self._client, CoreGroup)
            ids = self._client.requests_of(engine)
        return self._fail(error, ids)

    def _fail(self, error: Exception, ids: Sequence[str] | None = None) -> int:
        """ids: what the core calls the requests; None for all of them."""
        streams = list(self._streams.values())
        if ids is not None:
            some = set(ids)
            streams = [stream for stream in streams if stream.parsed.requests[0].id in some]
        for stream in streams:
            stream.fail(error)
        return len(streams) + self._pooled.fail(error, ids)

    async def check_health(self) -> None:
        """Raises EngineDeadError for a core that is gone, EngineUnhealthyError for one that is silent or stuck."""
        health = self.health()
        if health.cause is not None:
            raise EngineDeadError(health.cause)
        if health.state in ("unresponsive", "stuck"):
            raise EngineUnhealthyError(health)

    async def get_tokenizer(self) -> Tokenizer | None:
        """The model's, None where it has none."""
        return self._tokenizer

    async def stats(self) -> CoreStats:
        """The core's counters; the answer comes between two steps. Raises EngineDeadError."""
        await self.start()
        return await self._client.stats()

    async def engine_stats(self, seconds: float | None = None) -> list[CoreStats | None]:
        """Of each core; None for one that is gone, or takes longer to answer."""
        await self.start()
        return await self._client.engine_stats(seconds)

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prompts; False, and nothing done, while requests use some. Raises EngineDeadError."""
        await self.start()
        return await self._client.reset_prefix_cache()

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """See `LLMEngine.collective_rpc`. Raises EngineDeadError, too."""
        await self.start()
        return await self._client.collective_rpc(call_of(method, args, kwargs or {}), timeout)

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """See `LLMEngine.start_profile`."""
        await self.collective_rpc(START_PROFILE, args=(profile_prefix or PROFILE_PREFIX,))

    async def stop_profile(self) -> list[str]:
        """See `LLMEngine.stop_profile`."""
        return await self.collective_rpc(STOP_PROFILE)

    async def close(self, drain_timeout: float = 0.0) -> None:
        """End the core, after ``drain_timeout`` seconds for the requests there are; new ones are refused at once."""
        if self._teller is not None:
            self._teller.cancel()
        await self._client.close(drain_timeout)
        self._long_texts.shutdown(wait=False, cancel_futures=True)
        if self._receiver is not None:
            await self._receiver
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    def shutdown(self, grace: float | None = None) -> None:
        """End the core without asking, and wait for it; open streams raise EngineDeadError. `close` is gentler. grace:
        seconds between SIGTERM and SIGKILL, None for the usual."""
        self._client.kill(grace)

    def _abort_core(self, ids: Sequence[str]) -> None:
        if ids:
            with contextlib.suppress(EngineDeadError):
                self._client.abort(ids)

    async def _receive(self) -> None:
        try:
            async for news in self._client.updates():
                match news:
                    case Updates(updates):
                        for start in range(0, len(updates), _SLICE):
                            self._deliver(updates[start : start + _SLICE])
                            await asyncio.sleep(0)
                    case Rejected():
                        self._reject(news)
                    case Lost(ids, cause):
                        self._fail(EngineDeadError(cause), ids)
                    case CoreLoad():  # for who shares the requests out
                        pass
        except EngineDeadError:
            pass
        except Exception as e:
            # A defect of this program; streams that wait for ever would hide it.
            self._cause = DeathCause(
                kind="exception", message=f"in the front: {type(e).__name__}: {e}", traceback=traceback.format_exc()
            )
            await self._client.close()
        gone = self.health().cause
        assert gone is not None
        self._fail(EngineDeadError(gone))

    def _deliver(self, updates: Sequence[EngineCoreOutput]) -> None:
        self._pooled.take(updates)
        self._give_out(self._outputs.process(updates))

    def _give_out(self, processed: Processed) -> None:
        for output in processed.outputs:
            self._streams[output.request_id].put(output)
        self._abort_core(processed.aborts)
        self._bound_unread()

    def _bound_unread(self) -> None:
        unread = sum(stream.unread for stream in self._streams.values())
        if unread <= self._most_unread:
            return
        before = time.monotonic() - _UNREAD_SECONDS
        slow = {name: stream for name, stream in self._streams.items() if stream.unread and stream.since < before}
        for name in sorted(slow, key=lambda name: slow[name].unread, reverse=True):
            unread -= slow[name].unread
            slow[name].drop(SlowReaderError("stream: too much of it waits to be read; read it as it comes"))
            self._abort_core(self._outputs.abort([name]))
            if unread <= self._most_unread:
                break

    def _reject(self, news: Rejected) -> None:
        error: Exception
        match news.kind:
            case "queue_full":
                error = QueueFullError(news.message)
            case "invalid":
                error = ConfigError(news.message)
            case "closing":
                error = EngineDeadError(DeathCause(kind="closed", message=news.message))
        for stream in self._streams.values():
            if stream.parsed.requests[0].id == news.ids[0]:
                stream.fail(error)
        self._pooled.fail(error, news.ids)


class _Stream:
    """What one reader has not taken yet: one output at most, then an error. unread: tokens and log-probabilities of a
    stream of deltas, which grow; since: when the oldest came."""

    def __init__(self, parsed: ParsedRequest) -> None:
        self.parsed = parsed
        self.unread, self.since = 0, 0.0
        self._pending: RequestOutput | None = None
        self._dropped = False
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        if self._dropped:
            return
        delta = self.parsed.params.output_kind is RequestOutputKind.DELTA
        if delta:
            if not self.unread:
                self.since = time.monotonic()
            entries = 1 + max(self.parsed.params.logprobs or 0, 0)
            self.unread += entries * sum(len(completion.token_ids) for completion in output.outputs)
        self._pending = merge(self._pending, output) if delta else output
        self._news.set()

    def drop(self, error: Exception | None = None) -> None:
        """Forget what was not taken, and take no more."""
        self._pending, self.unread, self._dropped = None, 0, True
        if error is not None:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Raise this, or what was said first, once everything was taken; an output that finished the request counts."""
        self._error = self._error or error
        self._news.set()

    async def get(self) -> RequestOutput:
        await self._news.wait()
        if self._pending is not None:
            output, self._pending, self.unread = self._pending, None, 0
            if self._error is None:
                self._news.clear()
            return output
        assert self._error is not None
        raise self._error


def merge(older: RequestOutput | None, newer: RequestOutput) -> RequestOutput:
    """Two outputs of kind DELTA as one."""
    if older is None:
        return newer
    found = {completion.index: completion for completion in older.outputs}
    for completion in newer.outputs:
        before = found.get(completion.index)
        found[completion.index] = completion if before is None else _joined(before, completion)
    newer.outputs = [found[index] for index in sorted(found)]
    if newer.prompt_logprobs is None:
        newer.prompt_logprobs = older.prompt_logprobs
    return newer


def _joined(older: CompletionOutput, newer: CompletionOutput) -> CompletionOutput:
    """``older``, extended by ``newer``."""
    older.text += newer.text
    older.token_ids += newer.token_ids
    if older.logprobs is not None and newer.logprobs is not None:
        older.logprobs += newer.logprobs
    older.cumulative_logprob = newer.cumulative_logprob
    older.finish_reason, older.stop_reason = newer.finish_reason, newer.stop_reason
    older.error, older.mistake = newer.error, newer.mistake
    return older
