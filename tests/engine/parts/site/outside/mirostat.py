"""Mirostat 2 (Basu et al. 2021): each request keeps a bound of surprise, which follows what it has sampled.

A request asks for it by ``extra_args``: mirostat_tau, the surprise in bits that is aimed at, and mirostat_eta.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from graphllm.engine.parts.part import Part, PartContext
from graphllm.engine.requests.request import EngineCoreOutput
from graphllm.engine.requests.request_table import RequestState
from graphllm.engine.step.started_step import LogitsEdit, StartedStep


class Mirostat(Part):
    name = "mirostat"
    after = "logits_processors"

    def __init__(self, context: PartContext) -> None:
        super().__init__(context)
        self._bounds: dict[str, float] = {}  # of requests, in bits
        self._surprise: dict[int, torch.Tensor] = {}  # of every token, by the step's row

    def admit(self, state: RequestState) -> Mapping[str, np.ndarray]:
        if (tau := (state.request.params.extra_args or {}).get("mirostat_tau")) is not None:
            self._bounds.setdefault(state.request.id, 2.0 * tau)
            self.context.table.stop_at_logits(state.slot)
            self.context.scheduler.requests.verifiable[state.slot] = False
        return {}

    def edit(self, step: StartedStep, edit: LogitsEdit) -> Iterable[EngineCoreOutput]:
        rows = step.batch.rows
        names = [step.plan.requests[entry].request.id for entry in rows.entry.tolist()]
        bounds = {row: self._bounds[name] for row, name in enumerate(names) if name in self._bounds}
        self._surprise = {}

        def cut(logits: torch.Tensor) -> None:
            for row, bound in bounds.items():
                surprise = torch.log_softmax(logits[row], dim=-1) / -math.log(2)
                surprising = surprise > bound
                surprising[surprise.argmin()] = False
                logits[row].masked_fill_(surprising, -math.inf)
                self._surprise[row] = torch.log_softmax(logits[row], dim=-1) / -math.log(2)

        if bounds:
            edit.hooks.append(cut)
        return ()

    def commit(
        self, step: StartedStep, result: Any, news: Sequence[tuple[RequestState, EngineCoreOutput]]
    ) -> Iterable[int]:
        for row, surprise in self._surprise.items():
            state = step.plan.requests[step.batch.rows.entry[row]]
            if state.request.id in self._bounds and step.batch.rows.sample_index[row] >= 0:
                wanted = state.request.params.extra_args or {}
                off = surprise[int(result.tokens[row])].item() - wanted["mirostat_tau"]
                self._bounds[state.request.id] -= wanted.get("mirostat_eta", 0.1) * off
        return ()

    def end(self, id: str, output: Sequence[int]) -> None:
        self._bounds.pop(id, None)
