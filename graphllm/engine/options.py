"""How an engine schedules, and the hook for users' logits processors. Plain data; imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

if TYPE_CHECKING:
    import torch


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """max_num_queued_reqs: waiting requests above which new ones are refused; None: no limit.

    long_prefill_token_threshold: tokens of one prompt in one step at most; 0: as many as fit. cache_secret: engines
    with the same one may exchange cached prefixes; None: nobody can. snapshot_interval: recurrent states are kept for
    reuse at the end of a prompt and about every so many tokens; 0: only there.
    """

    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    max_num_queued_reqs: int | None = None
    long_prefill_token_threshold: int = 0
    cache_secret: str | None = None
    snapshot_interval: int = 0


class Row(NamedTuple):
    """What a logits processor is told of one row: the request's id, its tokens so far, and its ``extra_args``."""

    request_id: str
    prompt: Sequence[int]
    output: Sequence[int]
    extra_args: dict[str, object]


# Edits float32 logits [R, V] in place, one row for each entry of the list; docs/logits-processors.md has an example.
LogitsProcessor = Callable[["torch.Tensor", Sequence[Row]], None]
