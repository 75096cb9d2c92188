"""A step on its way: what was planned, what was launched, and what parts have found out about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphllm.config.token_tree import DynamicTree, TokenTree
from graphllm.engine.schedule.scheduler_output import SchedulerOutput
from graphllm.engine.step.batch import Batch
from graphllm.engine.step.step_executor import Handle

if TYPE_CHECKING:
    import torch


class DraftRows(NamedTuple):
    """The drafts that a step verifies.

    tokens [verified, query_len - 1]: of each entry; negative for none.
    tree: that they fill; None where they are one run.
    parents [verified, nodes]: of dynamic trees, the node before each one.
    """

    tokens: np.ndarray
    tree: TokenTree | DynamicTree | None
    parents: np.ndarray | None = None

    def of(self, entry: int) -> list[int]:
        """The drafts of an entry; none of one that does not verify."""
        found: list[int] = self.tokens[entry].tolist() if entry < len(self.tokens) else []
        return found

    def tree_of(self, entry: int) -> TokenTree | None:
        """The tree of these drafts, None where they are one run."""
        if self.tree is None:
            return None
        known = self.parents is not None and entry < len(self.tokens)
        return self.tree.of_step(self.parents[entry].tolist() if self.parents is not None and known else None)


NO_DRAFTS = DraftRows(np.zeros((0, 0), dtype=np.int32), None)


@dataclass(slots=True)
class StartedStep:
    """plan: the scheduler's. batch: its arrays. handle: of the launched step. begun: seconds. drafts: that it verifies,
    once they are known. seconds: that it took, once its result is there."""

    plan: SchedulerOutput
    batch: Batch
    handle: Handle
    begun: float
    drafts: DraftRows = NO_DRAFTS
    seconds: float = 0.0


@dataclass(slots=True)
class LogitsEdit:
    """What happens at a step's logits, before tokens are chosen.

    mask [M, ceil(V / 32)] int32: of the batch's masked rows; a bit says whether a token may come.
    scores: whether any row wants log-probabilities.
    whole: rows that want the log-probabilities of the whole vocabulary.
    hooks: functions that edit the float32 logits [R, V] in place, in their order.
    """

    mask: np.ndarray | None = None
    scores: bool = False
    whole: list[int] = field(default_factory=list)
    hooks: list[Callable[[torch.Tensor], None]] = field(default_factory=list)

    @property
    def hook(self) -> Callable[[torch.Tensor], None] | None:
        """All hooks as one."""
        if len(self.hooks) < 2:
            return self.hooks[0] if self.hooks else None
        hooks = self.hooks

        def edit(logits: torch.Tensor) -> None:
            for hook in hooks:
                hook(logits)

        return edit
