"""What users may put into an engine: logits processors. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from graphllm.config.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch


class Row(NamedTuple):
    """What a logits processor is told of one row: the request's id, its tokens so far (drafts before the row included,
    where they are verified), its ``extra_args`` and all of its parameters. in_prompt: a row inside the prompt, which
    only reports log-probabilities."""

    request_id: str
    prompt: Sequence[int]
    output: Sequence[int]
    extra_args: dict[str, object]
    params: SamplingParams
    in_prompt: bool = False


# Edits float32 logits [R, V] in place, one row for each entry of the list; docs/logits-processors.md has an example.
LogitsProcessor = Callable[["torch.Tensor", Sequence[Row]], None]


def rowwise(processor: object) -> bool:
    """Whether a logits processor says of itself that what it does to a row follows from the row and what it is told of
    it. Then it may be asked for rows behind drafts, of which some will not have been."""
    return getattr(processor, "rowwise", False) is True
