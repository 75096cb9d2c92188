"""Experts: tokens of each are counted, and experts move between ranks as tokens choose them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from graphllm.engine.parts.part import Part, PartContext
from graphllm.engine.requests.request import CoreStats, EngineCoreOutput
from graphllm.engine.requests.request_table import RequestState
from graphllm.engine.schedule.scheduler_output import SchedulerOutput
from graphllm.engine.step.started_step import StartedStep
from graphllm.runtime.commands.command import Command

if TYPE_CHECKING:
    from graphllm.runtime.step_handle import StepResult


class Experts(Part):
    """balancer: says which experts move; None where they do not."""

    name = "experts"

    def __init__(self, context: PartContext) -> None:
        super().__init__(context)
        self.balancer = context.setup.balancer
        self._tokens: np.ndarray | None = None  # [layers, experts], since the start

    @classmethod
    def applies(cls, context: PartContext) -> bool:
        return context.setup.balancer is not None or "expert_tokens" in context.executor.outputs

    def before(self, plan: SchedulerOutput) -> Iterable[Command]:
        return self.balancer.next() if self.balancer is not None else ()

    def commit(
        self, step: StartedStep, result: StepResult, news: Sequence[tuple[RequestState, EngineCoreOutput]]
    ) -> Iterable[int]:
        if (counted := result.outputs.get("expert_tokens")) is not None:
            before = 0 if self._tokens is None else self._tokens
            self._tokens = before + counted.astype(np.int64)
            if self.balancer is not None:
                self.balancer.count(counted)
        return ()

    def stats(self, into: CoreStats) -> None:
        into.expert_tokens = [] if self._tokens is None else self._tokens.tolist()
        if self.balancer is not None:
            into.expert_moves, into.expert_balancedness = self.balancer.moved, self.balancer.balancedness()
