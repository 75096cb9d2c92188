"""What a user gets for a prompt of a model that gives vectors: vLLM's classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    from graphllm.engine.vectors.pooling import PoolingRequest


@dataclass(slots=True)
class PoolingOutput:
    """data: a float32 tensor [D], or [tokens, D]."""

    data: torch.Tensor


@dataclass(slots=True)
class EmbeddingOutput:
    """embedding: D floats."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many there are."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """probs: one for each class."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many there are."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """score: how well two texts go together."""

    score: float


@dataclass(slots=True)
class PoolingRequestOutput:
    """The vector of one prompt. outputs: a `PoolingOutput`, or what the class of the request's output says."""

    request_id: str
    outputs: Any
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool


@dataclass(slots=True)
class EmbeddingRequestOutput(PoolingRequestOutput):
    """The embedding of one prompt, an `EmbeddingOutput`."""


@dataclass(slots=True)
class ClassificationRequestOutput(PoolingRequestOutput):
    """The classes of one prompt, a `ClassificationOutput`."""


@dataclass(slots=True)
class ScoringRequestOutput(PoolingRequestOutput):
    """The score of a pair, a `ScoringOutput`. prompt_token_ids: of both texts."""


def pooling_output(asked: PoolingRequest, found: np.ndarray, cached: int) -> PoolingRequestOutput:
    """The output of a request for its vector."""
    import torch  # here, because those who only generate need none of it

    data = PoolingOutput(torch.from_numpy(np.ascontiguousarray(found)))
    return PoolingRequestOutput(asked.id, data, asked.request.prompt, cached, True)
