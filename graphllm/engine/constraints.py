"""What a request's next tokens may be, as masks: where its output stands in its grammar, and everything else that the
host must know the tokens for. Drafts are followed one by one, so that each position has the mask of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from graphllm.engine.batch import SamplingTable
from graphllm.engine.request_table import RequestState

if TYPE_CHECKING:
    from graphllm.engine.structured.compiler import Grammar, Matcher


class ConstraintError(Exception):
    """A grammar that cannot go on; the text is for people."""


class Constraints:
    """Of the requests that have a grammar, where they stand in it. table: the other constraints."""

    def __init__(self, table: SamplingTable) -> None:
        self._table = table
        self._grammars: dict[str, Grammar] = {}
        self._matchers: dict[str, Matcher] = {}

    def __contains__(self, id: str) -> bool:
        return id in self._matchers

    def add(self, id: str, grammar: Grammar) -> None:
        """A request begins."""
        self._grammars[id], self._matchers[id] = grammar, grammar.matcher()

    def forget(self, id: str) -> None:
        """A request has ended."""
        self._grammars.pop(id, None)
        self._matchers.pop(id, None)

    def write(self, state: RequestState, masks: np.ndarray, drafts: Sequence[int]) -> None:
        """Write the masks [n, words] of a request's next tokens: the first one behind what is known, each other one
        behind one draft more. Where a draft may not come next, what is sampled behind it does not count, and nothing is
        written. Raises ConstraintError where no token may come next."""
        from graphllm.engine.structured.source import GrammarError

        matcher, output = self._matchers.get(state.request.id), list(state.output)
        taken = 0
        try:
            for i, mask in enumerate(masks):
                if i:
                    draft = drafts[i - 1]
                    if draft < 0 or not masks[i - 1, draft >> 5] >> (draft & 31) & 1:
                        break
                    if matcher is not None and _holds(state, output):
                        matcher.advance(draft)
                        taken += 1
                    output.append(draft)
                if matcher is not None and _holds(state, output):
                    matcher.allow(mask)
                self._table.mask_row(mask, state.slot, state, output)
            if matcher is not None:
                matcher.rollback(taken)
        except GrammarError as problem:
            if len(output) == len(state.output):
                raise ConstraintError(f"structured_outputs: {problem}") from problem
            self._replay(state)  # it failed behind a draft, which may be wrong: it is as if there were none

    def _replay(self, state: RequestState) -> None:
        """A new matcher, to where the output stands."""
        matcher = self._grammars[state.request.id].matcher()
        for i, token in enumerate(state.output):
            if _holds(state, state.output[:i]):
                matcher.advance(token)
        self._matchers[state.request.id] = matcher

    def advance(self, state: RequestState, new: Sequence[int]) -> int | None:
        """Take the newest tokens of a request's output; how many of them count when they end its text, else None.
        Raises ConstraintError where one of them may not come."""
        from graphllm.engine.structured.source import GrammarError

        matcher, known = self._matchers[state.request.id], len(state.output) - len(new)
        try:
            for i, token in enumerate(new):
                if _holds(state, state.output[: known + i]):
                    matcher.advance(token)
                if matcher.finished:
                    return i + 1
        except GrammarError as problem:
            raise ConstraintError(f"structured_outputs: {problem}") from problem
        return None


def _holds(state: RequestState, output: Sequence[int]) -> bool:
    """Whether a request's grammar holds for what comes behind that output; there is none before its thinking ended."""
    return state.request.thinking is None or not state.request.thinking.goes_on(output)
