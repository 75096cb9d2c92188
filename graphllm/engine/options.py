"""The hook for users' logits processors. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Row(NamedTuple):
    """What a logits processor is told of one row: the request's id, its tokens so far, and its ``extra_args``."""

    request_id: str
    prompt: Sequence[int]
    output: Sequence[int]
    extra_args: dict[str, object]


# Edits float32 logits [R, V] in place, one row for each entry of the list; docs/logits-processors.md has an example.
LogitsProcessor = Callable[["torch.Tensor", Sequence[Row]], None]
