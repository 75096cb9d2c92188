"""What a request's next tokens may be, as masks: where its output stands in its grammar, and everything else that the
host must know the tokens for. Drafts are followed one by one, so that each position has the mask of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from graphllm.config.token_tree import TokenTree, chain
from graphllm.engine.requests.request_table import RequestState
from graphllm.engine.step.batch import SamplingTable

if TYPE_CHECKING:
    from graphllm.config.requests.sampling_params import SamplingParams
    from graphllm.engine.structured.bad_words import BadWords
    from graphllm.engine.structured.compiler import Grammar, Matcher


class ConstraintError(Exception):
    """A grammar that cannot go on; the text is for people."""


class Constraints:
    """Of the requests that have a grammar, where they stand in it, and the words of others. table: what is left."""

    def __init__(self, table: SamplingTable) -> None:
        self._table = table
        self._grammars: dict[str, Grammar] = {}
        self._matchers: dict[str, Matcher] = {}
        self._words: dict[str, BadWords] = {}

    @property
    def count(self) -> int:
        """Requests that are constrained."""
        return len({*self._matchers, *self._words})

    def __contains__(self, id: str) -> bool:
        return id in self._matchers or id in self._words

    def add(self, id: str, grammar: Grammar | None, words: BadWords | None) -> None:
        """A request begins."""
        if grammar is not None:
            self._grammars[id], self._matchers[id] = grammar, grammar.matcher()
        if words is not None:
            self._words[id] = words

    def forget(self, id: str) -> None:
        """A request has ended."""
        self._grammars.pop(id, None)
        self._matchers.pop(id, None)
        self._words.pop(id, None)

    def write(
        self, state: RequestState, masks: np.ndarray, drafts: Sequence[int], tree: TokenTree | None = None
    ) -> None:
        """Write the masks [n, words] of a request's next tokens. Row 0 masks the next token. Row i masks the token
        after draft i (in a tree: after the drafts on the path to node i). Where a draft may not come next, tokens
        after it do not count, and nothing is written. Raises ConstraintError where no token may come next."""
        from graphllm.engine.structured.source import GrammarError

        id, output = state.request.id, list(state.output)
        matcher, words = self._matchers.get(id), self._words.get(id)
        tree = tree or chain(max(len(masks) - 1, 1))
        parents, children = tree.parents, tree.children
        path: list[tuple[int, bool]] = []  # the drafts after the known output, and whether the matcher has taken each
        todo = [0] if len(masks) else []
        while todo:
            node = todo.pop()
            kept = next((i for i, (on, _) in enumerate(path, 1) if on == parents[node]), 0)
            _go_back(matcher, path, kept, output)
            draft = drafts[node - 1] if node else -1
            if node and (draft < 0 or not masks[parents[node], draft >> 5] >> (draft & 31) & 1):
                continue
            try:
                if node:
                    taken = matcher is not None and _holds(state, output)
                    if matcher is not None and taken:
                        matcher.advance(draft)
                    path.append((node, taken))
                    output.append(draft)
                    if matcher is not None and matcher.finished:
                        continue  # nothing counts after the end
                if matcher is not None and _holds(state, output):
                    matcher.allow(masks[node])
            except GrammarError as problem:
                if not node:
                    raise ConstraintError(f"structured_outputs: {problem}") from problem
                # It failed after a draft, which may be wrong: the draft is ignored, and other branches go on.
                if len(path) > kept:
                    path.pop()
                    output.pop()
                matcher = self._replay(state, [drafts[on - 1] for on, taken in path if taken])
                continue
            if words is not None:
                words.forbid(masks[node], output)
            self._table.mask_row(masks[node], state.slot, state, output)
            if not node and not masks[0].any():
                raise ConstraintError(_nothing_left(state.request.params))
            todo += [child for child in reversed(children[node]) if child < len(masks)]
        _go_back(matcher, path, 0, output)

    def _replay(self, state: RequestState, drafts: Sequence[int]) -> Matcher:
        """A new matcher that has taken the output, and then the drafts."""
        matcher = self._grammars[state.request.id].matcher()
        for i, token in enumerate(state.output):
            if _holds(state, state.output[:i]):
                matcher.advance(token)
        for token in drafts:
            matcher.advance(token)
        self._matchers[state.request.id] = matcher
        return matcher

    def advance(self, state: RequestState, new: Sequence[int]) -> int | None:
        """Take the newest tokens of a request's output; how many of them count when they end its text, else None.
        Raises ConstraintError where one of them may not come."""
        from graphllm.engine.structured.source import GrammarError

        matcher, known = self._matchers.get(state.request.id), len(state.output) - len(new)
        if matcher is None:
            return None
        try:
            for i, token in enumerate(new):
                if _holds(state, state.output[: known + i]):
                    matcher.advance(token)
                if matcher.finished:
                    return i + 1
        except GrammarError as problem:
            raise ConstraintError(f"structured_outputs: {problem}") from problem
        return None


def _nothing_left(params: SamplingParams) -> str:
    names = ("structured_outputs", "allowed_token_ids", "bad_words", "thinking_token_budget")
    given = [name for name in names if getattr(params, name)]
    return f"{' and '.join(given)} leave no token that may come next; change or leave out one of them"


def _go_back(matcher: Matcher | None, path: list[tuple[int, bool]], kept: int, output: list[int]) -> None:
    """Drop the drafts after the first ``kept`` ones."""
    if len(path) == kept:
        return
    if matcher is not None:
        matcher.rollback(sum(taken for _, taken in path[kept:]))
    del output[len(output) - len(path) + kept :], path[kept:]


def _holds(state: RequestState, output: Sequence[int]) -> bool:
    """Whether a request's grammar holds after that output; it does not before its thinking has ended."""
    return state.request.thinking is None or not state.request.thinking.goes_on(output)
