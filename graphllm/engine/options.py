"""How an engine schedules, and the hook for users' logits processors. Plain data; imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

if TYPE_CHECKING:
    import torch


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """max_num_queued_reqs: waiting requests above which new ones are refused; None: no limit.

    long_prefill_token_threshold: tokens of one prompt in one step at most; 0: as many as fit.
    """

    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    max_num_queued_reqs: int | None = None
    long_prefill_token_threshold: int = 0


class Row(NamedTuple):
    """What a logits processor is told of one row: the request's id, its tokens so far, and its ``extra_args``."""

    request_id: str
    prompt: Sequence[int]
    output: Sequence[int]
    extra_args: dict[str, object]


# Edits float32 logits [R, V] in place, one row for each entry of the list; docs/logits-processors.md has an example.
LogitsProcessor = Callable[["torch.Tensor", Sequence[Row]], None]
