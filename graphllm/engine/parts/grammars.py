"""Constraints on tokens: structured outputs, bad words, allowed tokens, the end of thinking."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from graphllm.config import ConfigError
from graphllm.engine.parts.part import WAIT, Part, PartContext
from graphllm.engine.requests.request import EngineCoreOutput, EngineRequest
from graphllm.engine.requests.request_table import RequestState
from graphllm.engine.step.constraints import ConstraintError, Constraints
from graphllm.engine.step.started_step import LogitsEdit, StartedStep

if TYPE_CHECKING:
    from graphllm.engine.structured.bad_words import BadWords
    from graphllm.engine.structured.compiler import Grammar

_COMPILERS = 4  # grammars compiled at once; a large one takes seconds, and small ones do not wait for it


class Grammars(Part):
    """A request with a grammar waits until it is compiled, in a thread. compilers: may be replaced."""

    name = "grammars"

    def __init__(self, context: PartContext) -> None:
        super().__init__(context)
        self.compilers = context.setup.grammars
        self.constraints = Constraints(context.table)
        self._threads = concurrent.futures.ThreadPoolExecutor(_COMPILERS, "graphllm-grammars")
        self._compiling: dict[
            str, tuple[EngineRequest, concurrent.futures.Future[tuple[Grammar | None, BadWords | None]]]
        ] = {}

    @classmethod
    def applies(cls, context: PartContext) -> bool:
        return context.executor.task == "generate"

    @property
    def held(self) -> int:  # type: ignore[override]
        return len(self._compiling)

    def receive(self, request: EngineRequest) -> EngineRequest | None:
        if request.id in self._compiling:
            raise ConfigError(f"request_id: {request.id!r} is already running; ids must be unique")
        if request.params.structured_outputs is None and not request.params.bad_words:
            return request
        if self.compilers is None:
            raise ConfigError("structured_outputs and bad_words: there is no tokenizer to read them by; leave them out")
        self.context.scheduler.check(request)
        self._compiling[request.id] = request, self._threads.submit(self.compilers.constraints, request.params)
        return None

    def gather(self, idle: bool) -> Iterable[EngineRequest | EngineCoreOutput]:
        return self._compiled(idle) if self._compiling else ()

    def _compiled(self, idle: bool) -> Iterator[EngineRequest | EngineCoreOutput]:
        if idle:
            futures = [f for _, f in self._compiling.values()]
            concurrent.futures.wait(futures, timeout=WAIT, return_when=concurrent.futures.FIRST_COMPLETED)
        for id, (request, future) in list(self._compiling.items()):
            if future.done():
                del self._compiling[id]
                try:
                    self.constraints.add(id, *future.result())
                    yield request
                except ConfigError as mistake:
                    yield EngineCoreOutput(id, [], "error", error=str(mistake), mistake=True)

    def abort(self, id: str) -> bool:
        if (compiling := self._compiling.pop(id, None)) is None:
            return False
        compiling[1].cancel()
        return True

    def admit(self, state: RequestState) -> Mapping[str, np.ndarray]:
        if state.request.id in self.constraints or state.request.thinking is not None:
            self.context.table.always_mask(state.slot)
        return {}

    def edit(self, step: StartedStep, edit: LogitsEdit) -> Iterable[EngineCoreOutput]:
        rows = step.batch.rows
        if not len(rows.masked):
            return
        edit.mask = mask = np.full((len(rows.masked), self.context.table.words), -1, dtype=np.int32)
        entries = rows.entry[rows.masked]
        first = np.flatnonzero(np.diff(entries, prepend=-1))  # the masked rows of an entry are its first ones
        for at, end in zip(first, [*first[1:], len(mask)], strict=True):
            entry = int(entries[at])
            state = step.plan.requests[entry]
            if state.finish_reason is None:  # else it ended with the step before; its rows are not looked at
                try:
                    self.constraints.write(state, mask[at:end], step.drafts.of(entry), step.drafts.tree_of(entry))
                except ConstraintError as problem:
                    self.context.scheduler.fail(state, str(problem), mistake=True)
                    yield EngineCoreOutput(state.request.id, [], "error", error=str(problem), mistake=True)

    def complete(self, state: RequestState, output: EngineCoreOutput) -> None:
        """Tell a request's grammar its new tokens. If it cannot go on, the request ends. Tokens after the grammar's end
        are dropped."""
        tokens = output.tokens
        if state.request.id not in self.constraints or state.finish_reason == "error":
            return
        # One that a stop token has ended needs to know of the tokens before that only.
        new = tokens[:-1] if state.finish_reason == "stop" else tokens
        try:
            count = self.constraints.advance(state, new)
        except ConstraintError as problem:
            self.context.scheduler.fail(state, str(problem), mistake=True)
            return
        if count is not None:
            del state.output[len(state.output) - len(tokens) + count :], tokens[count:]
            state.stop_reason = None
            self.context.scheduler.end(state, "stop")

    def end(self, id: str, output: Sequence[int]) -> None:
        self.constraints.forget(id)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
