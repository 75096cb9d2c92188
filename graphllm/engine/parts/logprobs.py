"""Log-probabilities of sampled tokens and of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from graphllm.config.compilation import ranked_logprobs
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.parts.part import Part, PartContext
from graphllm.engine.requests.request import EngineCoreOutput, PositionLogprobs
from graphllm.engine.requests.request_table import RequestState
from graphllm.engine.step.started_step import LogitsEdit, StartedStep

if TYPE_CHECKING:
    from graphllm.runtime.step_handle import StepResult


class Logprobs(Part):
    """A step ranks some tokens at each position; the host ranks the whole vocabulary for requests that want more."""

    name = "logprobs"

    def __init__(self, context: PartContext) -> None:
        super().__init__(context)
        self._ranked = ranked_logprobs(context.executor.max_logprobs)
        self._of_prompts: dict[str, list[PositionLogprobs]] = {}  # so far
        self._sampled: dict[str, list[PositionLogprobs]] = {}  # of the step that is committed

    @classmethod
    def applies(cls, context: PartContext) -> bool:
        return context.executor.task == "generate"

    def edit(self, step: StartedStep, edit: LogitsEdit) -> Iterable[EngineCoreOutput]:
        wanted = np.flatnonzero(step.batch.rows.wanted >= 0)
        edit.scores = len(wanted) > 0
        edit.whole += [row for row in wanted.tolist() if self._wants_all(step, row)]
        return ()

    def _wants_all(self, step: StartedStep, row: int) -> bool:
        rows = step.batch.rows
        params = step.plan.requests[rows.entry[row]].request.params
        inside = bool(rows.sample_index[row] < 0)
        return self._unranked(params, inside) > 0 or (not inside and params.logprob_token_ids is not None)

    def _unranked(self, params: SamplingParams, inside: bool) -> int:
        """How many log-probabilities a row wants if a step finds fewer, else 0. inside: the row scores the prompt."""
        wanted = (params.prompt_logprobs if inside else params.logprobs) or 0
        return self.context.executor.vocab if wanted == -1 else wanted if wanted > self._ranked else 0

    def arrived(self, step: StartedStep, result: StepResult) -> None:
        self._sampled = {}
        if not step.batch.full or (scores := result.outputs.get("scores")) is None:
            return
        rows = step.batch.rows
        for row in np.flatnonzero(rows.wanted >= 0):
            state = step.plan.requests[rows.entry[row]]
            inside = bool(rows.sample_index[row] < 0)
            if state.finish_reason is not None:
                continue
            token = int(step.batch.step.arrays["target"][row]) if inside else int(result.tokens[row])
            params = state.request.params
            named = () if inside else params.logprob_token_ids or ()
            whole = result.whole.get(int(row))
            most = self._unranked(params, inside)
            ranked = _ranked(token, scores[row], most or int(rows.wanted[row]), whole if most else None)
            if named and whole is not None:
                ranked.named = [(i, float(whole[i]), 1 + int(np.count_nonzero(whole > whole[i]))) for i in named]
            (self._of_prompts if inside else self._sampled).setdefault(state.request.id, []).append(ranked)

    def complete(self, state: RequestState, output: EngineCoreOutput) -> None:
        if state.request.params.logprobs is not None:
            output.logprobs = self._sampled.get(output.id, [])[: len(output.tokens)]
        if len(state.output) == len(output.tokens):  # its first
            output.prompt_logprobs = self._of_prompts.pop(output.id, None)

    def end(self, id: str, output: Sequence[int]) -> None:
        self._of_prompts.pop(id, None)


def _ranked(token: int, scores: np.ndarray, wanted: int, whole: np.ndarray | None) -> PositionLogprobs:
    """One row of `token_logprobs`. whole: log-probabilities of the vocabulary, where it has fewer than are wanted."""
    logprob, rank = float(scores[0]), int(scores[1])
    if whole is not None:
        order = np.argsort(-whole, kind="stable")[:wanted]
        return PositionLogprobs(token, logprob, rank, order.tolist(), whole[order].tolist())
    k = (len(scores) - 2) // 2
    values, ids = scores[2 : 2 + wanted], scores[2 + k : 2 + k + wanted]
    return PositionLogprobs(token, logprob, rank, ids.astype(np.int32).tolist(), values.tolist())
