"""What a user gets for a prompt of a model that gives vectors: vLLM's classes, made from the core's numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graphllm.config import ConfigError
from graphllm.config.pooling import PoolingParams

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class PoolingOutput:
    """data: a float32 tensor [D]."""

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
class PoolingRequestOutput:
    """The vector of one prompt. outputs: a `PoolingOutput`, or the `EmbeddingOutput` of an `EmbeddingRequestOutput`."""

    request_id: str
    outputs: Any
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool


@dataclass(slots=True)
class EmbeddingRequestOutput(PoolingRequestOutput):
    """The embedding of one prompt."""


def check_pooling(params: PoolingParams) -> None:
    """Raise ConfigError for what an embedding cannot be made into."""
    if params.dimensions is not None and params.dimensions < 1:
        raise ConfigError(f"dimensions is {params.dimensions}: give at least 1, or None for all that the model gives")
    if params.task not in (None, "embed"):
        raise ConfigError(f"task is {params.task!r:.80}: the model gives embeddings; use 'embed'")
    for name in ("truncate_prompt_tokens", "softmax", "step_tag_id", "returned_token_ids", "extra_kwargs"):
        if (value := getattr(params, name)) is not None:
            raise ConfigError(f"{name} is {value!r:.80}: not supported for embeddings; leave it out")


def vector(pooled: bytes, params: PoolingParams) -> torch.Tensor:
    """float32 [dimensions]: the first numbers of what the model gave, of length 1 unless the parameters say not. Raises
    ConfigError when it gave fewer."""
    import torch  # here, because those who only generate need none of it

    found = torch.from_numpy(np.frombuffer(pooled, np.float32).copy())
    if params.dimensions is not None and params.dimensions > len(found):
        raise ConfigError(f"dimensions is {params.dimensions}: the model gives {len(found)}; give no more")
    found = found[: params.dimensions]
    switches = (params.normalize, params.use_activation, params.activation)
    return found if False in switches else torch.nn.functional.normalize(found, dim=0)
