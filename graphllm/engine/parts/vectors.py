"""Models that give vectors: each prompt ends with one, or with one for each token, which may be kept."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.parts.part import Kept, Part, PartContext
from graphllm.engine.requests.request import CoreStats, EngineCoreOutput, EngineRequest
from graphllm.engine.requests.request_table import RequestState
from graphllm.engine.step.started_step import StartedStep
from graphllm.engine.vectors.pooled_vectors import PooledVectors
from graphllm.engine.vectors.vector_cache import KeptVectors

if TYPE_CHECKING:
    from graphllm.runtime.step_handle import StepResult

_USUAL, _WHOLE = SamplingParams(), SamplingParams(skip_reading_prefix_cache=True)


class Vectors(Part):
    """Takes the vectors of a step, and answers requests for vectors that were kept."""

    name = "vectors"

    def __init__(self, context: PartContext) -> None:
        super().__init__(context)
        self._per_token = context.executor.vector[0] == "T"
        self._vectors = PooledVectors(self._per_token)
        keeps = context.options.enable_prefix_caching and self._per_token
        self._kept = KeptVectors(context.options.token_vector_memory_bytes) if keeps else None

    @classmethod
    def applies(cls, context: PartContext) -> bool:
        return context.executor.task == "pool"

    def receive(self, request: EngineRequest) -> EngineRequest | EngineCoreOutput:
        if request.limit:
            raise ConfigError(f"request {request.id}: limit is {request.limit}: the model gives vectors; use 0")
        # The cache has no vectors of tokens that it holds.
        request = msgspec.structs.replace(request, params=_WHOLE if self._per_token else _USUAL)
        if self._kept is None or (vectors := self._kept.find(request)) is None:
            return request
        tokens, stats = len(request.prompt), self.context.stats
        stats.prompt_tokens += tokens
        stats.cached_tokens += tokens
        stats.token_vector_hits += 1
        return EngineCoreOutput(request.id, [], "length", cached=tokens, scheduled=time.monotonic(), pooled=vectors)

    def commit(
        self, step: StartedStep, result: StepResult, news: Sequence[tuple[RequestState, EngineCoreOutput]]
    ) -> Iterable[int]:
        self._vectors.give(step.plan, result.outputs["pooled"], [output for _, output in news])
        return ()

    def complete(self, state: RequestState, output: EngineCoreOutput) -> None:
        if self._kept is not None and output.pooled and state.finish_reason is not None:
            self._kept.keep(state.request, output.pooled)

    def end(self, id: str, output: Sequence[int]) -> None:
        self._vectors.forget(id)

    def stats(self, into: CoreStats) -> None:
        into.token_vector_bytes = self._kept.size if self._kept is not None else 0

    def reset(self, where: Kept) -> None:
        if self._kept is not None and where != "device":
            self._kept.clear()
