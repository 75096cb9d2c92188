"""From a prompt and `PoolingParams` to a request for a vector, and from the core's numbers to what was asked for.
Scores of pairs are made of such requests. numpy only: servers import it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from graphllm.config import ConfigError
from graphllm.config.errors import ErrorPlace
from graphllm.config.requests.pooling_params import NO_POOLING, PoolingParams, Vectors
from graphllm.engine.requests.processor import Processor, Prompt, Truncation
from graphllm.engine.requests.request import Adapter, CoreInfo, EngineCoreOutput, EngineRequest
from graphllm.engine.requests.text import Tokenizer

_OLDER = {"embedding": "embed", "reward": "classify", "encode": None, "auto": None, "": None}


class Pair(NamedTuple):
    """A prompt of two texts, for a cross-encoder."""

    first: str
    second: str


class PoolingRequest(NamedTuple):
    """A checked request. task: what its vector becomes."""

    request: EngineRequest
    params: PoolingParams
    task: str

    @property
    def id(self) -> str:
        """Of the request."""
        return self.request.id


class Pooling:
    """The requests for vectors of one core's model.

    processor: of the same core.
    vectors: what the model gives.
    """

    def __init__(self, processor: Processor, tokenizer: Tokenizer | None, info: CoreInfo, vectors: Vectors) -> None:
        self._processor, self._tokenizer, self._info, self.vectors = processor, tokenizer, info, vectors

    @property
    def tokenwise(self) -> bool:
        """Whether there is a vector for each token."""
        return self._info.vectors == "token"

    @property
    def tasks(self) -> tuple[str, ...]:
        """What its requests may ask for, the usual one first; nothing where the model generates text."""
        if self._info.task != "pool":
            return ()
        if self.vectors.kind == "classify":
            return ("token_classify",) if self.tokenwise else ("classify", "score")
        return ("token_embed", "score") if self.tokenwise else ("embed", "score")

    def task(self, wanted: str | None, field: str = "task") -> str:
        """The task that a request means. Raises ConfigError for one that the model does not have."""
        if self._info.task != "pool":
            raise ConfigError(f"{field}: not supported; {NO_POOLING}")
        known = _OLDER.get(wanted, wanted) if wanted is not None else None
        if known is None:
            return self.tasks[0]
        if known not in self.tasks:
            gives = "classes" if self.vectors.kind == "classify" else "embeddings"
            each = " for each token" if self.tokenwise else ""
            raise ConfigError(
                f"{field} is {wanted!r:.80}: the model gives {gives}{each}; use {' or '.join(map(repr, self.tasks))}"
            )
        return known

    def make(
        self,
        prompt: Prompt | Pair,
        params: PoolingParams,
        request_id: str,
        *,
        task: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: Adapter | None = None,
    ) -> PoolingRequest:
        """Check a request.

        prompt: as `instructed` gives it, or two texts.
        task: None for that of the parameters.

        Raises ConfigError naming field, value and remedy.
        """
        if not isinstance(params, PoolingParams):
            raise ConfigError(f"pooling_params is {params!r:.80}: give PoolingParams")
        meant = self.task(task if task is not None else params.task)
        self._check(params, meant)
        second = 0
        if isinstance(prompt, Pair):
            ids, second = self._pair(prompt, params)
            prompt = {"prompt_token_ids": ids}
        request = self._processor.make_pooling(prompt, request_id, priority, cache_salt, adapter)
        return PoolingRequest(msgspec.structs.replace(request, second=second) if second else request, params, meant)

    def result(self, asked: PoolingRequest, output: EngineCoreOutput) -> np.ndarray:
        """float32 [D], or [tokens, D] of a model with a vector for each token: what the core gave, as was asked for.
        Raises RuntimeError for a request that did not end as it should."""
        if not output.pooled:
            raise RuntimeError(f"request {output.id} ended with {output.finish_reason}: {output.error}")
        found = np.frombuffer(output.pooled, np.float32)
        params = asked.params
        if self.tokenwise:
            found = found.reshape(len(asked.request.prompt), -1)
            if params.step_tag_id is not None:
                found = found[np.array(asked.request.prompt) == params.step_tag_id]
        if params.dimensions is not None:
            found = found[..., : params.dimensions]
        found = activated(found, self.vectors.activation) if params.activates else found.copy()
        return found if params.returned_token_ids is None else found[..., params.returned_token_ids]

    def _check(self, params: PoolingParams, task: str) -> None:
        size = self._info.vector_size
        embeds = self.vectors.kind == "embed"
        if (wanted := params.dimensions) is not None:
            if not embeds:
                raise ConfigError(f"dimensions is {wanted!r:.80}: the model gives classes; leave it out")
            if type(wanted) is not int or wanted < 1:
                raise ConfigError(
                    f"dimensions is {wanted!r:.80}: give at least 1, or None for all that the model gives"
                )
            if size and wanted > size:
                raise ConfigError(f"dimensions is {wanted}: the model gives {size}; give no more")
            if (trained := self.vectors.checkpoint.dimensions) and wanted not in trained:
                raise ConfigError(f"dimensions is {wanted}: the model is made for {', '.join(map(str, trained))}")
        if params.step_tag_id is not None and not self.tokenwise:
            raise ConfigError(f"step_tag_id is {params.step_tag_id!r:.80}: the model gives one vector; leave it out")
        if (classes := params.returned_token_ids) is not None and (
            embeds or any(type(i) is not int or not 0 <= i < max(size, 1) for i in classes)
        ):
            problem = "gives embeddings; leave it out" if embeds else f"has {size} classes; give some of their numbers"
            raise ConfigError(f"returned_token_ids is {classes!r:.80}: the model {problem}")
        if (most := params.truncate_prompt_tokens) is not None and (type(most) is not int or most < 1) and most != -1:
            raise ConfigError(
                f"truncate_prompt_tokens is {most!r:.80}: give at least 1, or -1 for what the model takes"
            )

    def instructed(self, prompt: Prompt, name: str | None, params: PoolingParams) -> Prompt:
        """A prompt as the core shall see it: with the checkpoint's prompt of that name before the text, and truncated
        where the parameters ask for it."""
        prompts = self.vectors.checkpoint.prompts
        if name is None:
            name = self.vectors.checkpoint.default_prompt_name if self.vectors.kind == "embed" else None
        fields = dict(prompt) if isinstance(prompt, Mapping) else {}
        if not isinstance(prompt, Mapping):
            fields["prompt" if isinstance(prompt, str) else "prompt_token_ids"] = prompt
        checkpoint = self.vectors.checkpoint
        if name is not None:
            if name not in prompts:
                there = f"there are {', '.join(prompts)}" if prompts else "the checkpoint has none; leave it out"
                raise ConfigError(f"prompt_name is {name!r:.80}: {there}")
            if isinstance(fields.get("prompt"), str):
                if prompts[name] and not checkpoint.include_prompt and checkpoint.pooling_type == "MEAN":
                    raise ConfigError(
                        f"prompt_name is {name!r:.80}: the checkpoint's include_prompt is false, and a mean without "
                        "the prompt's tokens is not supported; put what the prompt says into the text, or leave it out"
                    )
                fields["prompt"] = prompts[name] + fields["prompt"]
        if isinstance(fields.get("prompt"), str) and checkpoint.lowercase:
            fields["prompt"] = fields["prompt"].lower()
        most = self._kept(params) if isinstance(fields.get("prompt"), str) else params.truncate_prompt_tokens
        if most is not None:
            fields.setdefault("truncation", Truncation(most, "right"))
        return fields

    def _kept(self, params: PoolingParams) -> int | None:
        """How many tokens of a text are kept: as the request says, else as the checkpoint does; None for all."""
        room, own, asked = (
            self._info.max_model_len,
            self.vectors.checkpoint.max_seq_length,
            params.truncate_prompt_tokens,
        )
        if asked == -1:
            return min(room, own or room)
        return own if asked is None and own is not None and own <= room else asked

    def _pair(self, pair: Pair, params: PoolingParams) -> tuple[list[int], int]:
        """Token ids of two texts, and the number of the first token of the second, where the tokenizer tells them
        apart."""
        if self._tokenizer is None:
            raise ConfigError("data_1 is text and there is no tokenizer; score needs one")
        if not all(isinstance(text, str) for text in pair):
            raise ConfigError(f"data is {pair!r:.80}: a cross-encoder reads texts; give two")
        most, room = self._kept(params), self._info.max_model_len
        if self.vectors.checkpoint.lowercase:
            pair = Pair(*(text.lower() for text in pair))
        if most is not None and most > room:
            raise ConfigError(f"truncate_prompt_tokens is {most}: there is room for {room}; give no more, or -1")
        for text in pair:  # refuses what is far too long before it is tokenized as a whole
            for ids in self._processor.encode(text, False, truncated=most is not None):
                if ids is not None:
                    break
        return self._tokenizer.encode_pair(*pair, most)

    # --- scores of pairs

    def scoring(self, first: Sequence[Any], second: Sequence[Any], fields: tuple[str, str]) -> Scoring:
        """Scores of texts against others: 1-1, 1-N, or N-N by place. fields: what the caller's two arguments are
        called. Raises ConfigError for other numbers, and for a model of several classes."""
        self.task("score", "score")
        if not first or not second:
            raise ConfigError(f"{fields[0] if not first else fields[1]} is empty: give at least one text")
        if len(first) not in (1, len(second)):
            raise ConfigError(
                f"{fields[0]} has {len(first)} entries and {fields[1]} {len(second)}: give one, or as many"
            )
        places = [
            [ErrorPlace(field, i if len(texts) > 1 else None) for i in range(len(texts))]
            for field, texts in zip(fields, (first, second), strict=True)
        ]
        if self.vectors.kind == "classify":
            if self._info.vector_size > 1:
                raise ConfigError(
                    f"{fields[0]}: the model has {self._info.vector_size} classes, and a score is one number; use "
                    "classify"
                )
            repeated = list(first) * (len(second) // len(first))
            pairs: list[Any] = [Pair(a, b) for a, b in zip(repeated, second, strict=True)]
            # The second ones are as many, and mostly those that differ.
            return Scoring(pairs, places[1], lambda found: [float(vector.reshape(-1)[0]) for vector in found])
        compare = max_sim if self.tokenwise else cosine
        count = len(first)

        def scores(found: Sequence[np.ndarray]) -> list[float]:
            queries = list(found[:count]) * (len(second) // count)
            return [compare(a, b) for a, b in zip(queries, found[count:], strict=True)]

        return Scoring([*first, *second], places[0] + places[1], scores)


class Scoring(NamedTuple):
    """What a request for scores needs.

    prompts: prompts that need vectors.
    places: where each prompt stands in the request.
    scores: makes one number for each pair from the vectors.
    """

    prompts: list[Any]
    places: list[ErrorPlace]
    scores: Callable[[Sequence[np.ndarray]], list[float]]


def activated(found: np.ndarray, activation: str) -> np.ndarray:
    """Rows of length 1, or probabilities; the numbers themselves for "identity". float32."""
    wide = found.astype(np.float64)
    if activation == "normalize":
        wide /= np.maximum(np.sqrt((wide * wide).sum(-1, keepdims=True)), 1e-12)
    elif activation == "softmax":
        wide = np.exp(wide - wide.max(-1, keepdims=True))
        wide /= wide.sum(-1, keepdims=True)
    elif activation == "sigmoid":
        wide = 0.5 * (1 + np.tanh(0.5 * wide))
    return wide.astype(np.float32)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Of two vectors, float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12))


def max_sim(query: np.ndarray, document: np.ndarray) -> float:
    """Late interaction: for each vector [D] of the query the largest product with one of the document, summed."""
    return float((query.astype(np.float64) @ document.astype(np.float64).T).max(1).sum())
