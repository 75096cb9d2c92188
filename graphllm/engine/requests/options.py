"""What users may put into an engine: logits processors. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from graphllm.config.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch


class Row(NamedTuple):
    """What a logits processor knows about one row.

    request_id: the request's id.
    prompt, output: its tokens so far; the output includes drafts before the row, where drafts are verified.
    extra_args: of the request.
    params: all of its sampling parameters.
    in_prompt: the row is inside the prompt and only reports log-probabilities.
    """

    request_id: str
    prompt: Sequence[int]
    output: Sequence[int]
    extra_args: dict[str, object]
    params: SamplingParams
    in_prompt: bool = False


# Edits float32 logits [R, V] in place, one row for each entry of the list; docs/logits-processors.md has an example.
LogitsProcessor = Callable[["torch.Tensor", Sequence[Row]], None]


def rowwise(processor: object) -> bool:
    """Whether a logits processor declares that it edits a row by that row and its `Row`, and by nothing else. Then it
    may be asked for rows after drafts, and some of these will be rejected."""
    return getattr(processor, "rowwise", False) is True
