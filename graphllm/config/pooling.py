"""`PoolingParams`, with vLLM's fields. `graphllm.engine.pooling_outputs` says which of them models that give vectors
take; those that generate text refuse all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NO_POOLING = (
    "the model generates text; use generate or chat with SamplingParams, and a pooling server for embeddings, classes "
    "and scores"
)


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """How a model's vectors are made, where it makes some."""

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    softmax: bool | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: Any = None
