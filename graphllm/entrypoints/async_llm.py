"""AsyncLLM: requests as asynchronous streams, from an engine core in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from graphllm.config import ConfigError, EngineArgs
from graphllm.config.requests.pooling_params import Vectors
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.config.vllm.view import VllmConfig
from graphllm.engine.process.core_client import CoreClient, Health
from graphllm.engine.process.core_group import CoreGroup
from graphllm.engine.process.messages import DeathCause, EngineDeadError, Ready
from graphllm.engine.process.remote_core import RemoteCore
from graphllm.engine.process.sleep_orders import PauseMode
from graphllm.engine.process.spawn import Child
from graphllm.engine.requests.outputs import OutputProcessor, RequestOutput
from graphllm.engine.requests.processor import GrammarChecker, Processor, Prompt
from graphllm.engine.requests.request import Adapter, CoreInfo, CoreStats
from graphllm.engine.requests.text import Tokenizer
from graphllm.engine.vectors.pooling import Pooling
from graphllm.entrypoints.adapters import AdapterFiles, LoRARequest
from graphllm.entrypoints.stat_loggers import LoggingStatLogger, StatLogger, StatLoggerFactory, log_all, log_regularly
from graphllm.entrypoints.stat_loggers import stat_loggers as stat_loggers_of
from graphllm.entrypoints.streaming.async_pooling import PoolingAsyncMixin
from graphllm.entrypoints.streaming.async_processor import AsyncProcessor, LongTexts
from graphllm.entrypoints.streaming.engine_cores import EngineCores
from graphllm.entrypoints.streaming.streams import UNREAD, PooledRequests, RequestNames, RequestStreams
from graphllm.entrypoints.tracing import TracedRequest, Tracing
from graphllm.loading.artifact.model import ResolvedModel, grammar_maker, resolve_model
from graphllm.loading.core.core_clients import core_client
from graphllm.runtime.commands.calls import PROFILE_PREFIX, START_PROFILE, STOP_PROFILE, call_of

_VECTORS = Vectors()


class EngineUnhealthyError(RuntimeError):
    """The core lives, but is silent or stuck in a step; ``health`` says which."""

    def __init__(self, health: Health) -> None:
        super().__init__(f"the engine core is {health.state} for {health.seconds:.1f} s")
        self.health = health


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
        """client: not started yet. grammar: makes the checker once the core's vocabulary is known. loggers: get the
        core's figures every ten seconds. unread: tokens and log-probabilities that may wait for their readers.
        tracing: gets a span of each request. vectors: as for `Pooling`. The others: as for `Processor`."""
        self._client, self._tokenizer, self._grammar, self._seed = client, tokenizer, grammar, seed
        self._tracing, self._vectors, self._loggers = tracing, vectors, loggers
        self._texts = LongTexts(tokenizer)
        self._names, self._pooled, self._outputs = RequestNames(), PooledRequests(), OutputProcessor(tokenizer)
        self._streams = RequestStreams(self._outputs, self._pooled, self._abort_core, unread)
        self.cores = EngineCores(client, self._streams)
        self._processor: AsyncProcessor | None = None  # this one and the next two: once the core is loaded
        self._pooling: Pooling | None = None
        self._adapters: AdapterFiles | None = None
        self._starting: asyncio.Task[None] | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._stats_task: asyncio.Task[None] | None = None
        self._cause: DeathCause | None = None  # a defect of this side

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
    ) -> AsyncLLM:
        """Find the model and its artifact, which is built when the policy says so; `start`, or the first request, then
        loads it in a process of its own. stat_loggers: make loggers that replace the line in the log. The others
        change nothing. Raises ConfigError."""
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
        """The same, of `EngineArgs.create_engine_config`. enable_log_requests: changes nothing."""
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
        tokenizer, grammar = resolved.tokenizer, grammar_maker(resolved)
        return cls(client, tokenizer, grammar, seed, loggers, tracing=tracing, vectors=resolved.vectors)

    @classmethod
    def for_shared_core(
        cls, core: RemoteCore | CoreGroup, resolved: ResolvedModel, seed: int | None, unread: int
    ) -> AsyncLLM:
        """One more front of an engine that another process has started. seed: differs from the other fronts' seeds."""
        return cls(core, resolved.tokenizer, grammar_maker(resolved), seed, unread=unread, vectors=resolved.vectors)

    async def start(self) -> None:
        """Wait until the core is loaded. Raises ConfigError for settings that cannot be, EngineDeadError."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)  # others may wait for it too

    async def _start(self) -> None:
        info = (await self._client.start()).info
        grammar = self._grammar(info) if self._grammar else None
        processor = Processor(self._tokenizer, info, grammar, self._seed)
        self._processor = AsyncProcessor(processor, self._texts)
        self._pooling = Pooling(processor, self._tokenizer, info, self._vectors)
        self._adapters = AdapterFiles(info)
        self._receiver = asyncio.create_task(self._receive())
        if self._loggers:
            self._stats_task = asyncio.create_task(log_regularly(self.do_log_stats, self._gone))

    def _gone(self) -> bool:
        """A dead core will not be replaced."""
        return not isinstance(self._client, CoreGroup) or self._client.closed

    async def do_log_stats(self) -> None:
        """Tell the loggers now. Raises EngineDeadError."""
        log_all(self._loggers, await self.stats())

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
        processor = await self._started()
        if lora_request is not None:
            adapter = await self.open_adapter(lora_request)
        with self._names.running(request_id) as name:
            parsed = await processor.make(
                prompt, sampling_params, name, priority=priority, cache_salt=cache_salt, adapter=adapter
            )
            with self._streams.opened(name, parsed) as stream:
                if self._cause is not None:
                    raise EngineDeadError(self._cause)
                self._client.add(parsed.requests)
                self._outputs.add(parsed)
                tracing = self._tracing
                trace = TracedRequest(tracing, request_id, parsed.params, trace_headers) if tracing else None
                finished = False
                while not finished:
                    output = await stream.get()
                    output.request_id, finished = request_id, output.finished
                    if trace is not None:
                        trace.take(output)
                    yield output

    async def open_adapter(self, request: LoRARequest) -> Adapter:
        """Read and check an adapter's files, in a thread. Raises ConfigError."""
        await self._started()
        assert self._adapters is not None
        return cast(Adapter, await asyncio.to_thread(self._adapters.requested, request))

    async def tokenized(self, prompt: Prompt) -> Prompt:
        """A prompt with its token ids, if it is text that takes a while to tokenize; else as it is. Raises ConfigError
        for one that is far too long."""
        return await (await self._started()).tokenized(prompt)

    async def token_ids(self, text: str, limit: int, add_special_tokens: bool = True) -> list[int]:
        """Token ids of any text. Raises ConfigError for one with far more than ``limit``."""
        return await self._texts.token_ids(text, limit, add_special_tokens)

    async def _started(self) -> AsyncProcessor:
        if self._processor is None:
            await self.start()
        assert self._processor is not None
        return self._processor

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their streams end with finish_reason "abort". Ids that are not running are ignored."""
        ids = [request_id] if isinstance(request_id, str) else request_id
        self._streams.abort([name for id in ids if (name := self._names.of(id)) is not None])

    def finish(self, request_id: str, index: int) -> None:
        """End one completion of a running request as a stop string does: its text is all there is. The request's
        outputs must come as they are made."""
        self._streams.finish(self._names.of(request_id) or "", index)

    @property
    def ready(self) -> Ready | None:
        """What the core said of itself once it was loaded: sizes, and the seconds of each phase. None before."""
        return self._client.ready

    @property
    def unfinished(self) -> int:
        """Number of requests with open streams."""
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
        """The error that every stream raises, if the core died."""
        cause = self.health().cause
        return None if cause is None or cause.kind == "closed" else EngineDeadError(cause)

    def health(self) -> Health:
        """The state of the core, without asking it."""
        health = self._client.health()
        return health if self._cause is None else Health("dead", health.seconds, self._cause)

    def fail_requests(self, error: Exception) -> int:
        """End all streams with this error, for a core that does not answer; how many. It is asked to abort them."""
        return self._streams.fail(error)

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

    async def get_kv_event_sources(self) -> dict[int, dict[str, Any]]:
        """Where each core publishes the events of its cache, by its rank; empty where none does."""
        await self.start()
        found = [dict(stats.kv_events) for stats in await self._client.engine_stats() if stats and stats.kv_events]
        return {source.pop("data_parallel_rank"): source for source in found}

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prompts; False, and nothing done, while requests use some. Raises EngineDeadError."""
        await self.start()
        return await self._client.reset_prefix_cache()

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """See `LLMEngine.sleep`; requests that come meanwhile wait, or are refused (requests_while_asleep). Raises
        EngineDeadError, too."""
        await self.start()
        await self._client.sleep(level, mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """See `LLMEngine.wake_up`; whether all of it is awake now. Raises EngineDeadError, too."""
        await self.start()
        return await self._client.wake_up(tags)

    async def is_sleeping(self) -> bool:
        """Whether the engine sleeps, at any level. Raises EngineDeadError."""
        await self.start()
        return await self._client.is_sleeping()

    async def release_kv_cache_memory(self) -> None:
        """See `LLMEngine.release_kv_cache_memory`. Raises EngineDeadError, too."""
        await self.start()
        await self._client.release_kv_cache_memory()

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
        if self._stats_task is not None:
            self._stats_task.cancel()
        await self._client.close(drain_timeout)
        self._texts.close()
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
                await self._streams.take(news)
        except EngineDeadError:
            pass
        except Exception as e:
            self._cause = _defect(e)
            await self._client.close()
        gone = self.health().cause
        assert gone is not None
        self._streams.fail(EngineDeadError(gone))


def _defect(error: Exception) -> DeathCause:
    """The cause of an end by a defect of this program. The engine ends; its streams would wait for ever."""
    text = "".join(traceback.format_exception(error))
    return DeathCause(kind="exception", message=f"in the front: {type(error).__name__}: {error}", traceback=text)
