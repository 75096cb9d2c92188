"""Speculative decoding on the host: drafts of a proposer, and what the host must know of drafts on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from graphllm.config import ConfigError
from graphllm.engine.drafts.proposers import find_proposer
from graphllm.engine.parts.part import Part, PartContext
from graphllm.engine.requests.request import CoreStats, EngineCoreOutput
from graphllm.engine.requests.request_table import RequestState
from graphllm.engine.schedule.scheduler_output import SchedulerOutput
from graphllm.engine.schedule.verification import DraftPlanner
from graphllm.engine.step.batch import Batch
from graphllm.engine.step.started_step import DraftRows, LogitsEdit, StartedStep
from graphllm.engine.step.token_ids import history

if TYPE_CHECKING:
    from graphllm.runtime.step_handle import StepResult


class Drafts(Part):
    """A proposer, if one is set, guesses when the tokens of a step are known. The next step is late: it is planned and
    staged without the drafts, which are filled in before it is launched."""

    name = "drafts"

    def __init__(self, context: PartContext) -> None:
        super().__init__(context)
        self._proposer = find_proposer(context.setup.speculation)
        self._tree = context.executor.layout.tree
        self.planner = context.scheduler.verification = DraftPlanner(
            context.executor.layout, context.limits, context.scheduler.requests, context.executor.device_drafts,
            late=self._proposer is not None, verify_at_most=context.setup.speculation.speculative_disable_by_batch_size,
        )  # fmt: skip
        self._on_device = np.zeros((0, 0), dtype=np.int32)  # of the next step, by slot
        self._parents = self._on_device  # of dynamic trees, by slot

    @classmethod
    def applies(cls, context: PartContext) -> bool:
        executor, proposer = context.executor, context.setup.speculation.draft_proposer
        if proposer is not None and (executor.device_drafts or not executor.layout.query_lens):
            why = "drafts come from the device" if executor.device_drafts else "num_speculative_tokens is 0"
            raise ConfigError(
                f"draft_proposer is {proposer!r}, but {why}: give num_speculative_tokens, and neither "
                "prompt_lookup_max nor a draft model"
            )
        return bool(executor.layout.query_lens or executor.layout.history)

    def admit(self, state: RequestState) -> Mapping[str, np.ndarray]:
        length = self.context.executor.layout.history
        return {"history": history(state.request.prompt, state.output, length)} if length else {}

    def is_late(self, plan: SchedulerOutput) -> bool:
        return self._proposer is not None and plan.verified > 0

    def complete_late(self, plan: SchedulerOutput, batch: Batch) -> tuple[SchedulerOutput, Batch]:
        v, q = plan.verified, plan.query_len
        drafts = np.full((v, q - 1), -1, dtype=np.int32)
        for row, state in zip(drafts, plan.requests[:v], strict=True):
            expected = state.drafts[: q - 1]
            row[: len(expected)] = expected
        ids = batch.step.arrays["token_ids"].copy()
        ids[: v * q].reshape(v, q)[:, 1:] = drafts.clip(min=0)
        step = batch.step._replace(arrays={**batch.step.arrays, "token_ids": ids})
        return plan._replace(drafts=drafts), batch._replace(step=step)

    def edit(self, step: StartedStep, edit: LogitsEdit) -> Iterable[EngineCoreOutput]:
        plan, slots = step.plan, step.plan.slots[: step.plan.verified]
        tokens = plan.drafts
        if tokens is None:  # on the device, and known here if a row of this step is masked or edited
            tokens = self._on_device[slots] if len(slots) and len(self._on_device) else self._on_device[:0]
        parents = self._parents[slots] if len(slots) and len(self._parents) else None
        step.drafts = DraftRows(tokens[: len(slots), : plan.query_len - 1], self._tree, parents)
        return ()

    def arrived(self, step: StartedStep, result: StepResult) -> None:
        if query_len := step.batch.step.query_len:
            self.planner.acceptance.timed(query_len, step.batch.step.sequences, step.seconds)

    def commit(
        self, step: StartedStep, result: StepResult, news: Sequence[tuple[RequestState, EngineCoreOutput]]
    ) -> Iterable[int]:
        self._on_device = result.outputs.get("drafts", self._on_device)
        self._parents = result.outputs.get("tree_parents", self._parents)
        return ()

    def committed(self) -> None:
        proposer, requests, most = self._proposer, self.context.scheduler.requests, self.planner.most_drafts
        if proposer is None or self.planner.acceptance.off(len(requests.running)):
            return
        for state in requests.running:
            if state.output:
                request = state.request
                drafts = list(proposer.propose(request.id, request.prompt, state.output, most))
                if any(not 0 <= token < self.context.executor.vocab for token in drafts):
                    raise ConfigError(
                        f"draft_proposer: {type(proposer).__name__} proposed {drafts}; not all of these are tokens"
                    )
                requests.propose(state, drafts[:most])

    def end(self, id: str, output: Sequence[int]) -> None:
        if self._proposer is not None:
            self._proposer.end(id, output)

    def stats(self, into: CoreStats) -> None:
        drafted = self.planner.acceptance
        into.drafts, into.draft_tokens = drafted.drafts, drafted.draft_tokens
        into.accepted_tokens = drafted.by_position.tolist()
