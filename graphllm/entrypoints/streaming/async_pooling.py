"""What `AsyncLLM` has for models that give vectors: requests with one answer each, from an engine core in its own
process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from graphllm.config.requests.pooling_params import PoolingParams
from graphllm.engine.process.core_client import CoreClient
from graphllm.engine.process.core_group import CoreGroup
from graphllm.engine.process.messages import DeathCause, EngineDeadError
from graphllm.engine.process.remote_core import RemoteCore
from graphllm.engine.requests.processor import Prompt
from graphllm.engine.requests.request import Adapter, EngineCoreOutput
from graphllm.engine.vectors.pooling import Pair, Pooling, PoolingRequest
from graphllm.engine.vectors.pooling_outputs import PoolingRequestOutput, pooling_output
from graphllm.entrypoints.adapters import LoRARequest
from graphllm.entrypoints.llm_engine import refuse
from graphllm.entrypoints.streaming.async_processor import LongTexts
from graphllm.entrypoints.streaming.streams import PooledRequests, RequestNames


class PoolingAsyncMixin:
    """The methods for vectors; what they need is `AsyncLLM`'s."""

    _client: CoreClient | RemoteCore | CoreGroup
    _names: RequestNames
    _pooling: Pooling | None
    _pooled: PooledRequests
    _texts: LongTexts
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
        with self._names.running(request_id) as name:
            if not isinstance(prompt, Pair):
                prompt = (await self.pooling()).instructed(prompt, None, pooling_params)
            asked, found, output = await self.vector(prompt, pooling_params, name, priority=priority, adapter=adapter)
            made = pooling_output(asked, found, output.cached)
            made.request_id = request_id
            yield made

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
        name = name if name is not None else self._names.new("pooled")

        def make(prompt: Prompt | Pair) -> PoolingRequest:
            return pooling.make(prompt, params, name, **options)

        if isinstance(prompt, Pair):
            asked = await self._texts.of_pair(prompt, make)
        else:
            asked = make(await self.tokenized(prompt))
        if self._cause is not None:
            raise EngineDeadError(self._cause)
        output = await self._pooled.run(self._client, asked.request)
        return asked, pooling.result(asked, output), output
