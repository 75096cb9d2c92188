"""A budget of output tokens for each user, whom a request names by ``extra_args``: when it is spent, requests end."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

from graphllm.config import ConfigError
from graphllm.engine.parts.part import Part, PartContext
from graphllm.engine.requests.request import EngineCoreOutput, EngineRequest
from graphllm.engine.requests.request_table import RequestState
from graphllm.engine.step.started_step import StartedStep

BUDGET = 40


def _user(request: EngineRequest) -> str | None:
    return (request.params.extra_args or {}).get("user")


class TokenBudget(Part):
    name = "token_budget"
    after = "logprobs"

    def __init__(self, context: PartContext) -> None:
        super().__init__(context)
        self._left: dict[str, int] = collections.defaultdict(lambda: BUDGET)

    def receive(self, request: EngineRequest) -> EngineRequest:
        if (user := _user(request)) is not None and self._left[user] <= 0:
            raise ConfigError(f"request {request.id}: the budget of {user} is spent")
        return request

    def commit(
        self, step: StartedStep, result: Any, news: Sequence[tuple[RequestState, EngineCoreOutput]]
    ) -> Iterable[int]:
        for index, (state, output) in enumerate(news):
            if (user := _user(state.request)) is None:
                continue
            more = len(output.tokens) - self._left[user]
            self._left[user] = max(-more, 0)
            if more > 0:
                del state.output[len(state.output) - more :], output.tokens[len(output.tokens) - more :]
            if more >= 0:
                self.context.scheduler.end(state, "length")
                yield index
