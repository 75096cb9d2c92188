"""The methods of `LLM` for models that give vectors: encode, embed, classify, score, reward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from graphllm.config import ConfigError
from graphllm.config.errors import ErrorPlace
from graphllm.config.requests.pooling_params import PoolingParams
from graphllm.engine.requests.processor import Prompt
from graphllm.engine.requests.request import EngineCoreOutput
from graphllm.engine.vectors.pooling import Pair, Pooling, PoolingRequest
from graphllm.engine.vectors.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    pooling_output,
)
from graphllm.entrypoints.adapters import LoRARequest
from graphllm.entrypoints.driver import Driver, Step
from graphllm.entrypoints.llm_engine import LLMEngine, refuse
from graphllm.entrypoints.offline import Show, bars, each, listed

Made = TypeVar("Made")
Params = PoolingParams | Sequence[PoolingParams]
Adapters = LoRARequest | Sequence[LoRARequest | None] | None


class PoolingOfflineMixin:
    """The methods of vLLM's `LLM` for vectors. These arguments mean the same in all of them:

    prompts, use_tqdm: as for `LLM.generate`.
    pooling_params, lora_request: for all prompts, or one each.
    truncate_prompt_tokens: replaces the value in pooling_params.

    Every method raises ConfigError when one request cannot run, and ends the others. It raises RuntimeError when the
    engine could not finish one.
    """

    llm_engine: LLMEngine
    _count: int

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Params | None = None,
        use_tqdm: Show = True,
        lora_request: Adapters = None,
        pooling_task: str | None = None,
        tokenization_kwargs: None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput]:
        """The vector of every prompt, in their order, as ``outputs.data`` [D], or [tokens, D] where the model gives one
        for each token. pooling_task: None for the model's own. prompt_name: which of the checkpoint's own prompts
        stands before each text."""
        refuse(tokenization_kwargs=tokenization_kwargs)
        params = truncated(pooling_params, truncate_prompt_tokens)
        field = "encode" if pooling_task is None or not self._pooling.tasks else "pooling_task"
        return self._outputs(_pooled, listed(prompts), params, use_tqdm, pooling_task, field, prompt_name, lora_request)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: Show = True,
        pooling_params: Params | None = None,
        lora_request: Adapters = None,
        tokenization_kwargs: None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of every prompt as ``outputs.embedding``, a list of floats."""
        refuse(tokenization_kwargs=tokenization_kwargs)
        params = truncated(pooling_params, truncate_prompt_tokens)
        return self._outputs(_embedded, listed(prompts), params, use_tqdm, "embed", "embed", prompt_name, lora_request)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: Show = True,
        pooling_params: Params | None = None,
        lora_request: Adapters = None,
        tokenization_kwargs: None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of the classes of every prompt as ``outputs.probs``."""
        refuse(tokenization_kwargs=tokenization_kwargs)
        params = truncated(pooling_params, truncate_prompt_tokens)
        return self._outputs(_classified, listed(prompts), params, use_tqdm, "classify", "classify", None, lora_request)

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: Params | None = None,
        use_tqdm: Show = True,
        lora_request: Adapters = None,
        tokenization_kwargs: None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput]:
        """The numbers of a reward model as ``outputs.data``, as it gives them unless pooling_params say otherwise."""
        raw = pooling_params if pooling_params is not None else PoolingParams(use_activation=False)
        raw = truncated(raw, truncate_prompt_tokens)
        refuse(tokenization_kwargs=tokenization_kwargs)
        task = "token_classify" if self._pooling.tokenwise else "classify"
        return self._outputs(_pooled, listed(prompts), raw, use_tqdm, task, "reward", None, lora_request)

    def score(
        self,
        data_1: str | Sequence[Any],
        data_2: str | Sequence[Any],
        *,
        use_tqdm: Show = True,
        pooling_params: PoolingParams | None = None,
        lora_request: Adapters = None,
        tokenization_kwargs: None = None,
        truncate_prompt_tokens: int | None = None,
        chat_template: None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together, as ``outputs.score``: one against one, one against each of many, or two lists of
        the same length by place. A classifier with one class reads both texts at once; of an embedder it is the cosine
        of two embeddings, of one with vectors for each token the sum over data_1's of the best product with one of
        data_2's."""
        refuse(tokenization_kwargs=tokenization_kwargs, chat_template=chat_template)
        pooling = self._pooling
        first, second = listed(data_1), listed(data_2)
        scoring = pooling.scoring(first, second, ("data_1", "data_2"))
        params = replace(truncated(pooling_params or PoolingParams(), truncate_prompt_tokens), task=None)
        found = self._outputs(
            _kept, scoring.prompts, params, use_tqdm, "score", "score", None, lora_request, scoring.places
        )
        scores = scoring.scores([vector for _, vector in found])
        together = [[asked] for asked, _ in found]
        if not isinstance(scoring.prompts[0], Pair):
            queries = together[: len(first)] * (len(second) // len(first))
            together = [a + b for a, b in zip(queries, together[len(first) :], strict=True)]
        return [
            ScoringRequestOutput(
                asked[-1].id, ScoringOutput(score), [i for a in asked for i in a.request.prompt], 0, True
            )
            for score, asked in zip(scores, together, strict=True)
        ]

    @property
    def _pooling(self) -> Pooling:
        return self.llm_engine.pooling

    def _outputs(
        self,
        made: Callable[[PoolingRequest, np.ndarray, EngineCoreOutput], Made],
        prompts: Sequence[Any],
        given: Params | None,
        use_tqdm: Show,
        task: str | None,
        field: str,
        prompt_name: str | None = None,
        lora_request: Adapters = None,
        places: Sequence[ErrorPlace] | None = None,
    ) -> list[Made]:
        """Run a request for each prompt. made: makes its output. places: of the prompts in what the caller was given,
        None for a list of prompts."""
        pooling = self._pooling
        meant = pooling.task(task, field)
        params = each("pooling_params", given if given is not None else PoolingParams(), PoolingParams, len(prompts))
        adapters = self.llm_engine.adapters.each(lora_request, len(prompts))
        named = places or [ErrorPlace("prompts", i) for i in range(len(prompts))]

        def requests() -> Iterator[PoolingRequest]:
            for prompt, how, adapter, place in zip(prompts, params, adapters, named, strict=True):
                try:
                    text = prompt if isinstance(prompt, Pair) else pooling.instructed(prompt, prompt_name, how)
                    asked_for = meant if task is not None else how.task
                    made = pooling.make(text, how, str(self._count), task=asked_for, adapter=adapter)
                except ConfigError as mistake:
                    raise place.error(mistake) from mistake
                self._count += 1
                yield made

        show = bars(use_tqdm)
        with show(total=len(prompts), desc="Processed prompts") if show else contextlib.nullcontext() as bar:
            done = (lambda: bar.update(1)) if bar is not None else (lambda: None)
            return run_pooling(self.llm_engine.driver, pooling, requests(), made, done)


def truncated(given: Any, tokens: int | None) -> Any:
    """Parameters that cut prompts to this many tokens; None leaves them as they are."""
    if tokens is None or not isinstance(given, (PoolingParams, list, tuple, type(None))):
        return given
    if isinstance(given, (list, tuple)):
        return [truncated(one, tokens) for one in given]
    return replace(given or PoolingParams(), truncate_prompt_tokens=tokens)


def run_pooling(
    driver: Driver,
    pooling: Pooling,
    requests: Iterable[PoolingRequest],
    made: Callable[[PoolingRequest, np.ndarray, EngineCoreOutput], Made],
    done: Callable[[], None],
) -> list[Made]:
    """Run requests for vectors to their end, in their order; see `Driver.run`. Requests are made, and ``made`` makes
    outputs of vectors, while the device works. Raises RuntimeError for a request that did not end as it should."""
    added: dict[str, PoolingRequest] = {}
    finished: dict[str, Made] = {}
    failed: dict[str, EngineCoreOutput] = {}

    def noted() -> Iterator[PoolingRequest]:
        for asked in requests:
            added[asked.id] = asked
            yield asked

    def take(step: Step) -> None:
        for output in step[0]:
            if output.finish_reason is None:
                continue
            if output.pooled:
                asked = added[output.id]
                finished[output.id] = made(asked, pooling.result(asked, output), output)
            else:
                failed[output.id] = output
            done()

    driver.run(noted(), take, ahead=True)
    for id, output in failed.items():
        pooling.result(added[id], output)
    return [finished[id] for id in added]


def _pooled(asked: PoolingRequest, vector: np.ndarray, output: EngineCoreOutput) -> PoolingRequestOutput:
    return pooling_output(asked, vector, output.cached)


def _embedded(asked: PoolingRequest, vector: np.ndarray, output: EngineCoreOutput) -> EmbeddingRequestOutput:
    made = EmbeddingOutput(vector.tolist())
    return EmbeddingRequestOutput(asked.id, made, asked.request.prompt, output.cached, True)


def _classified(asked: PoolingRequest, probs: np.ndarray, output: EngineCoreOutput) -> ClassificationRequestOutput:
    made = ClassificationOutput(probs.tolist())
    return ClassificationRequestOutput(asked.id, made, asked.request.prompt, output.cached, True)


def _kept(asked: PoolingRequest, vector: np.ndarray, output: EngineCoreOutput) -> tuple[PoolingRequest, np.ndarray]:
    return asked, vector
