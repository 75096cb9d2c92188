"""Balances the experts of ranks while they serve: counts tokens over the last steps, now and then decides where the
experts of each layer shall be, and has them moved there a little before each step."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator

import numpy as np

from graphllm.config import ParallelConfig
from graphllm.engine.experts.expert_placement import balanced, balancedness, moves_between, rank_loads
from graphllm.program.schema import ExpertLayout
from graphllm.runtime.commands.experts import MoveExperts
from graphllm.weights.plan.expert_slots import first_placement

_log = logging.getLogger(__name__)
_GAIN = 0.02  # of a layer's busiest rank: for less nothing is moved
_MOST_BYTES = 64 << 20  # moved before one step: 0.2 to 1 ms between GPUs


class ExpertBalancer:
    """Counts the tokens of experts, and decides which experts move.

    placements: of each layer with experts, after the moves so far.
    moved: copies of experts made so far.
    """

    def __init__(self, layout: ExpertLayout, config: ParallelConfig) -> None:
        self._layout, self._config = layout, config
        first = first_placement(layout.experts, layout.slots - layout.experts)
        self.placements = {layer: list(first) for layer in sorted(layout.layers)}
        self.moved = 0
        self._window: deque[np.ndarray] = deque(maxlen=config.eplb_window_size)
        self._tokens: np.ndarray | None = None  # of the window
        self._steps = 0
        self._work: Iterator[list[MoveExperts]] = iter(())
        self._working = False

    def count(self, tokens: np.ndarray) -> None:
        """Take in the tokens of a step, [layers, experts]."""
        if self._tokens is None:
            self._tokens = np.zeros(tokens.shape, dtype=np.int64)
        if len(self._window) == self._window.maxlen:
            self._tokens -= self._window[0]
        self._window.append(tokens)
        self._tokens += tokens
        self._steps += 1
        if self._steps % self._config.eplb_step_interval == 0 and not self._working:
            self._working = True
            self._work = self._rebalance(self._tokens.copy())

    def next(self) -> list[MoveExperts]:
        """What to move before the next step."""
        return next(self._work, [])

    def balancedness(self) -> dict[int, float]:
        """Of each layer with tokens in the window, by its number: the mean of the ranks' tokens over the most."""
        if self._tokens is None:
            return {}
        return {i: self._evenness(i, self._tokens) for i in self.placements if self._tokens[i].any()}

    def _evenness(self, layer: int, tokens: np.ndarray) -> float:
        return balancedness(rank_loads(tokens[layer].tolist(), self.placements[layer], self._layout.ranks))

    def _rebalance(self, tokens: np.ndarray) -> Iterator[list[MoveExperts]]:
        """Little by little: the moves before each step from now on. One layer after the other is decided on, before a
        step of its own, so that none waits for all of them."""
        before = [self._evenness(i, tokens) for i in self.placements if tokens[i].any()]
        moved = self.moved
        for layer, old in self.placements.items():
            new = balanced(tokens[layer].tolist(), old, self._layout.ranks, _GAIN)
            groups = moves_between(old, new, self._layout.ranks)
            while groups:
                some = self._some(groups)
                yield [self._moves(layer, some)]
            yield []
        self._working = False
        if self._config.eplb_log_balancedness and before:
            after = [self._evenness(i, tokens) for i in self.placements if tokens[i].any()]
            _log.info(
                "experts after %d steps: balancedness %.3f, %.3f after %d moves (mean of layers; least %.3f, %.3f)",
                self._steps, np.mean(before), np.mean(after), self.moved - moved, min(before), min(after),
            )  # fmt: skip

    def _some(self, groups: list[list[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
        """Take the first groups, as many as may be moved at a time."""
        count, size = 0, 0
        while count < len(groups) and (not count or size + len(groups[count]) * self._layout.bytes <= _MOST_BYTES):
            size += len(groups[count]) * self._layout.bytes
            count += 1
        some = groups[:count]
        del groups[:count]
        return some

    def _moves(self, layer: int, groups: list[list[tuple[int, int]]]) -> MoveExperts:
        placement = self.placements[layer]
        for group in groups:
            experts = [placement[source] for source, _ in group]
            for expert, (_, target) in zip(experts, group, strict=True):
                placement[target] = expert
            self.moved += len(group)
        return MoveExperts(layer, groups, list(placement))
