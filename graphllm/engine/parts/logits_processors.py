"""Logits processors: functions of users that edit the logits of every step."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from graphllm.config import ConfigError
from graphllm.engine.parts.part import Part, PartContext
from graphllm.engine.requests.options import Row, rowwise
from graphllm.engine.requests.request import EngineCoreOutput, EngineRequest
from graphllm.engine.requests.request_table import RequestState
from graphllm.engine.step.started_step import LogitsEdit, StartedStep

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


class LogitsProcessors(Part):
    """Runs them in their order, each with a row's request, tokens and parameters."""

    name = "logits_processors"
    edits_logits = True

    def __init__(self, context: PartContext) -> None:
        super().__init__(context)
        self._processors = context.setup.processors
        # One that counts its calls, or keeps a row for each request, cannot be asked for rows after drafts.
        stateful = [p for p in self._processors if not rowwise(p)]
        self._verifies = not stateful
        if stateful and context.executor.layout.query_lens:
            _log.warning(
                "drafts are not verified: the logits processor %s does not say that it is rowwise "
                "(docs/logits-processors.md)",
                getattr(stateful[0], "__name__", type(stateful[0]).__name__),
            )

    @classmethod
    def applies(cls, context: PartContext) -> bool:
        if context.setup.processors and context.executor.task != "generate":
            raise ConfigError("logits_processors: the model has no logits; leave them out")
        return bool(context.setup.processors)

    def receive(self, request: EngineRequest) -> EngineRequest:
        """Let processors that are classes refuse a request's parameters."""
        for processor in self._processors:
            try:
                getattr(processor, "validate_params", lambda params: None)(request.params)
            except ValueError as wrong:
                raise ConfigError(f"logits_processors: {wrong}") from wrong
        return request

    def admit(self, state: RequestState) -> Mapping[str, np.ndarray]:
        self.context.scheduler.requests.verifiable[state.slot] = self._verifies
        return {}

    def edit(self, step: StartedStep, edit: LogitsEdit) -> Iterable[EngineCoreOutput]:
        rows, edited = step.batch.rows, []
        for entry, place, index in zip(rows.entry.tolist(), rows.place.tolist(), rows.sample_index, strict=True):
            state = step.plan.requests[entry]
            before = step.drafts.of(entry)[:place] if place else []
            if before and (tree := step.drafts.tree_of(entry)) is not None:
                before = [draft for i, draft in enumerate(before, 1) if tree.ancestors[place] >> i & 1]
            # What is sampled after a missing draft does not count.
            output = [*state.output, *itertools.takewhile(lambda draft: draft >= 0, before)]
            params = state.request.params
            extra = dict(params.extra_args or {})
            edited.append(Row(state.request.id, state.request.prompt, output, extra, params, bool(index < 0)))

        def run(logits: torch.Tensor) -> None:
            for processor in self._processors:
                processor(logits, edited)

        edit.hooks.append(run)
        return ()
