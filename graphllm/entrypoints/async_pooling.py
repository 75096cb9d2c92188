"""What `AsyncLLM` has for models that give vectors: requests with one answer each, from an engine core in its own
process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from graphllm.config import ConfigError
from graphllm.config.requests.pooling_params import PoolingParams
from graphllm.engine.process.core_client import CoreClient
from graphllm.engine.process.core_group import CoreGroup
from graphllm.engine.process.messages import DeathCause, EngineDeadError
from graphllm.engine.process.remote_core import RemoteCore
from graphllm.engine.requests.processor import Prompt
from graphllm.engine.requests.request import Adapter, EngineCoreOutput, EngineRequest
from graphllm.engine.vectors.pooling import Pair, Pooling, PoolingRequest
from graphllm.engine.vectors.pooling_outputs import PoolingRequestOutput, pooling_output
from graphllm.entrypoints.adapters import LoRARequest
from graphllm.entrypoints.llm_engine import refuse

_LONG = 4096  # characters of a pair above which it is tokenized in a thread


class PooledRequests:
    """Requests for vectors that run, by the core's names of them."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[EngineCoreOutput]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, name: str) -> bool:
        return name in self._waiting

    async def run(self, client: CoreClient | RemoteCore | CoreGroup, request: EngineRequest) -> EngineCoreOutput:
        """The last output of a request. Raises what it fails with; one that nobody waits for any more is aborted."""
        future = self._waiting[request.id] = asyncio.get_running_loop().create_future()
        try:
            client.add([request])
            return await future
        except asyncio.CancelledError:
            client.abort([request.id])
            raise
        finally:
            del self._waiting[request.id]

    def take(self, updates: Iterable[EngineCoreOutput]) -> None:
        """Hand out those that end a request."""
        for update in updates if self._waiting else ():
            future = self._waiting.get(update.id)
            if future is not None and update.finish_reason is not None and not future.done():
                future.set_result(update)

    def fail(self, error: Exception, names: Sequence[str] | None = None) -> int:
        """End these, None for all, with an error; how many."""
        found = [self._waiting.get(name) for name in (list(self._waiting) if names is None else names)]
        waiting = [future for future in found if future is not None and not future.done()]
        for future in waiting:
            future.set_exception(error)
        return len(waiting)


class PoolingAsyncMixin:
    """The methods for vectors; what they need is `AsyncLLM`'s."""

    _client: CoreClient | RemoteCore | CoreGroup
    _names: dict[str, str]
    _numbers: itertools.count[int]
    _pooling: Pooling | None
    _pooled: PooledRequests
    _long_texts: ThreadPoolExecutor
    _cause: DeathCause | None

    async def start(self) -> None:
        """Wait until the core is loaded."""
        raise NotImplementedError

    async def open_adapter(self, request: LoRARequest) -> Adapter:
        """The adapter of a request, read and checked."""
        raise NotImplementedError

    async def tokenized(self, prompt: Prompt) -> Prompt:
        """A prompt with its token ids, if it takes a while to tokenize."""
        raise NotImplementedError

    async def encode(
        self,
        prompt: Prompt | Pair,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """The vector of a prompt, as ``outputs.data``, of a model that gives some; one output. Leaving early aborts it.
        trace_headers: change nothing. truncate_prompt_tokens: in place of the one in pooling_params. Raises as
        `AsyncLLM.generate`, and RuntimeError for one that was aborted."""
        refuse(tokenization_kwargs=tokenization_kwargs)
        if truncate_prompt_tokens is not None:
            pooling_params = replace(pooling_params, truncate_prompt_tokens=truncate_prompt_tokens)
        adapter = None if lora_request is None else await self.open_adapter(lora_request)
        if request_id in self._names:
            raise ConfigError(f"request_id: {request_id!r} is already running; ids must be unique")
        self._names[request_id] = name = f"{request_id}-{next(self._numbers)}"
        try:
            if not isinstance(prompt, Pair):
                prompt = (await self.pooling()).instructed(prompt, None, pooling_params)
            asked, found, output = await self.vector(prompt, pooling_params, name, priority=priority, adapter=adapter)
            made = pooling_output(asked, found, output.cached)
            made.request_id = request_id
            yield made
        finally:
            del self._names[request_id]

    async def pooling(self) -> Pooling:
        """What makes requests for vectors, once the core is loaded."""
        if self._pooling is None:
            await self.start()
        assert self._pooling is not None
        return self._pooling

    async def vector(
        self, prompt: Prompt | Pair, params: PoolingParams, name: str | None = None, **options: Any
    ) -> tuple[PoolingRequest, np.ndarray, EngineCoreOutput]:
        """A prompt's vector, with the request and the core's output. name: what the core calls it. options: of
        `Pooling.make`. Raises as `encode`."""
        pooling = await self.pooling()
        name = name if name is not None else f"pooled-{next(self._numbers)}"

        def make(prompt: Prompt | Pair) -> PoolingRequest:
            return pooling.make(prompt, params, name, **options)

        if not isinstance(prompt, Pair):
            asked = make(await self.tokenized(prompt))
        elif max(len(text) for text in prompt if isinstance(text, str)) > _LONG:
            asked = await asyncio.get_running_loop().run_in_executor(self._long_texts, make, prompt)
        else:
            asked = make(prompt)
        if self._cause is not None:
            raise EngineDeadError(self._cause)
        output = await self._pooled.run(self._client, asked.request)
        return asked, pooling.result(asked, output), output
