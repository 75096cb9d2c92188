"""LLMEngine: an engine in this process, driven step by step. `LLM` is the same without the loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from graphllm.config import ConfigError, EngineArgs
from graphllm.config.requests.pooling_params import Vectors
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.config.vllm.view import VllmConfig
from graphllm.engine.process.sleep_orders import PauseMode
from graphllm.engine.requests.outputs import OutputProcessor, RequestOutput
from graphllm.engine.requests.processor import GrammarChecker, Processor, Prompt
from graphllm.engine.requests.request import Core
from graphllm.engine.requests.text import Tokenizer
from graphllm.engine.vectors.pooling import Pooling
from graphllm.entrypoints.adapters import AdapterFiles, LoRARequest
from graphllm.entrypoints.driver import Driver
from graphllm.entrypoints.metrics_reader import Metric, MetricsReader
from graphllm.entrypoints.sleeping import sleeper
from graphllm.entrypoints.stat_loggers import SECONDS, StatLogger, StatLoggerFactory, log_all, stat_loggers
from graphllm.entrypoints.tracing import TracedRequest, Tracing
from graphllm.loading.artifact.model import resolve_model
from graphllm.loading.core.open_core import open_core
from graphllm.runtime.commands.calls import PROFILE_PREFIX, START_PROFILE, STOP_PROFILE, call_of

_VECTORS = Vectors()


class LLMEngine:
    """Takes requests, and gives what they have got after each `step`; for one thread at a time. Close it in the end.

    core, tokenizer, defaults, driver, pooling, adapters: its parts; `LLM` uses them, too.
    loggers: get its figures about every ten seconds while it steps.
    tracing: gets a span of each request.
    """

    def __init__(
        self,
        core: Core,
        tokenizer: Tokenizer | None,
        defaults: SamplingParams | None = None,
        grammar: GrammarChecker | None = None,
        seed: int | None = 0,
        loggers: Sequence[StatLogger] = (),
        tracing: Tracing | None = None,
        vectors: Vectors = _VECTORS,
    ) -> None:
        self.core, self.tokenizer = core, tokenizer
        self.defaults = defaults or SamplingParams()
        self.driver = Driver(core, Processor(tokenizer, core.info, grammar, seed), OutputProcessor(tokenizer))
        self.pooling = Pooling(self.driver.processor, tokenizer, core.info, vectors)
        self.adapters = AdapterFiles(core.info)
        self.metrics = MetricsReader()
        self._loggers, self._logged = loggers, time.monotonic()
        self._names: dict[str, str] = {}  # the core's, by the user's: it may not hear of the end of one in time
        self._params: dict[str, SamplingParams] = {}
        self._early: list[RequestOutput] = []  # of steps that were made before the engine fell asleep
        self._sleeper = sleeper(core, lambda: self._early.extend(self.driver.step()[1]))
        self._tracing, self._traces = tracing, dict[str, TracedRequest]()  # by its name
        self._count = 0

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: Any = None,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        enable_multiprocessing: bool = False,
    ) -> LLMEngine:
        """Find the model and its artifact, which is built when the policy says so, and load it. stat_loggers: make
        loggers that replace the line in the log. The others change nothing. Raises ConfigError."""
        return load_engine(engine_args, stat_loggers)

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: VllmConfig,
        usage_context: Any = None,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        disable_log_stats: bool = False,
    ) -> LLMEngine:
        """The same from what `EngineArgs.create_engine_config` has given."""
        args = vllm_config.engine_args
        return load_engine(replace(args, disable_log_stats=True) if disable_log_stats else args, stat_loggers)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a request. params: None for the model's defaults. arrival_time: is always now. Raises ConfigError for
        one that cannot run."""
        refuse(tokenization_kwargs=tokenization_kwargs)
        if request_id in self._names:
            raise ConfigError(f"request_id: {request_id!r} is already running; ids must be unique")
        adapter = self.adapters.requested(lora_request)
        name, self._count = f"{request_id}-{self._count}", self._count + 1
        make = self.driver.processor.make
        parsed = make(prompt, params or self.defaults, name, priority=priority, adapter=adapter)
        self.driver.submit(parsed)
        self._names[request_id], self._params[name] = name, parsed.params
        if self._tracing is not None:
            self._traces[name] = TracedRequest(self._tracing, request_id, parsed.params, trace_headers)
        return request_id

    def step(self) -> list[RequestOutput]:
        """One step of the engine; what requests have got by it, of the kind that each asks for."""
        early, self._early = self._early, []
        _, outputs = self.driver.step() if self.core.unfinished or not early else ([], [])
        outputs = [*early, *outputs]
        users = {name: id for id, name in self._names.items()} if outputs else {}
        for output in outputs:
            name, output.request_id = output.request_id, users[output.request_id]
            if (trace := self._traces.get(name)) is not None:
                trace.take(output)
            if output.finished:
                del self._names[output.request_id]
                self._traces.pop(name, None)
                self.metrics.finished(output, self._params.pop(name))
        if self._loggers and time.monotonic() - self._logged >= SECONDS:
            self.do_log_stats()
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether another `step` has something to do."""
        return bool(self._names)

    def get_num_unfinished_requests(self) -> int:
        """How many are not done."""
        return len(self._names)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests, without another output. Unknown ids are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        names = [name for id in ids if (name := self._names.pop(id, None)) is not None]
        for name in names:
            del self._params[name]
            self._traces.pop(name, None)
        self.driver.abort(names)

    def finished(self, output: RequestOutput, params: SamplingParams) -> None:
        """Count and trace a request that `driver` ran to its end. output: all of it."""
        self.metrics.finished(output, params)
        if self._tracing is not None:
            TracedRequest(self._tracing, output.request_id, params, None).take(output)

    def do_log_stats(self) -> None:
        """Give the loggers the figures now."""
        self._logged = time.monotonic()
        log_all(self._loggers, self.core.stats())

    def get_metrics(self) -> list[Metric]:
        """All that was counted since the engine's start."""
        return self.metrics.read(self.core.stats())

    def get_tokenizer(self) -> Tokenizer:
        """Raises ConfigError where there is none."""
        if self.tokenizer is None:
            raise ConfigError("tokenizer: there is none; leave out skip_tokenizer_init, or work with token ids")
        return self.tokenizer

    def reset_prefix_cache(self) -> bool:
        """Forget the cached blocks of earlier prompts."""
        return self.core.reset_prefix_cache()

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Give back the memory of weights and cache; with enable_sleep_mode. Captured graphs stay valid.

        level: 1 keeps the weights on the host; 2 drops them, and waking up reads them again; 0 gives no memory back.
        mode: abort ends the requests that there are; wait lets those that run finish first; keep has them go on after
        waking up. Requests that come meanwhile wait.

        Raises ConfigError; SleepError when it could not, and is awake as before.
        """
        self._sleeper.sleep(level, mode)
        self.driver.asleep = True

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Have memory again: of the tags weights and kv_cache, all if None. Requests run once all of it is there.
        Raises ConfigError; SleepError when it could not, and is asleep as before."""
        self.driver.asleep = not self._sleeper.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Whether the engine sleeps, at any level."""
        return self._sleeper.is_sleeping()

    def release_kv_cache_memory(self) -> None:
        """Give back the memory of the cache alone, of an engine that sleeps at level 0."""
        self._sleeper.release_kv_cache_memory()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """What a function returns on every rank of the engine, in their order. It runs between two steps, on all ranks
        at the same time, and is given a `Worker` first: the rank, its device and its weights.

        method: a function at the top of a module that the ranks' processes can import, or its name, module:function.
        args, kwargs: what follows, numbers, text, bytes, or lists or dictionaries of them, as what it returns. timeout:
        seconds after which a rank without an answer counts as gone. Raises RankCallError when the function fails, and
        the engine goes on.
        """
        return self.core.collective_rpc(call_of(method, args, kwargs or {}), timeout)

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Have every rank write a profile of what it does until `stop_profile`: its kernels, and each step with its
        size. profile_prefix: what the paths of the traces begin with."""
        self.collective_rpc(START_PROFILE, args=(profile_prefix or PROFILE_PREFIX,))

    def stop_profile(self) -> list[str]:
        """The paths of the traces, one of each rank, for Perfetto or chrome://tracing."""
        return self.collective_rpc(STOP_PROFILE)

    def close(self) -> None:
        """Give back memory and threads; nothing can be generated after it."""
        self.core.close()
        if self._tracing is not None:
            self._tracing.close()


def load_engine(args: EngineArgs, factories: Sequence[StatLoggerFactory] | None = None) -> LLMEngine:
    """An engine of this process. Raises ConfigError."""
    tracing = Tracing(args.otlp_traces_endpoint) if args.otlp_traces_endpoint else None
    resolved = resolve_model(args)
    core, grammar = open_core(resolved)
    loggers = stat_loggers(args, factories)
    return LLMEngine(
        core, resolved.tokenizer, resolved.defaults, grammar, args.seed, loggers, tracing, resolved.vectors
    )


_REMEDIES = {
    "tokenization_kwargs": 'leave it out; {"prompt": TEXT, "add_special_tokens": False} is text that has them',
    "chat_template": "pairs of texts go in as they are; put its words into the texts",
    "mm_processor_kwargs": "models here read text only; leave it out",
}


def refuse(**arguments: object) -> None:
    """Raise ConfigError for arguments of vLLM's that have a value and no meaning here."""
    for name, value in arguments.items():
        if value not in (None, {}, []):
            raise ConfigError(f"{name} is {value!r:.80}: {_REMEDIES[name]}")
