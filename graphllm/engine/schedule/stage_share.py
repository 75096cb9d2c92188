"""StageShare: which sequences a step leaves to other steps, where the stages of a pipeline run several at once. No
torch."""

from __future__ import annotations

import numpy as np

from graphllm.engine.requests.request_table import RequestTable


class StageShare:
    """One step at a time: it leaves none."""

    def choose(self, t: RequestTable, ready: np.ndarray, todo: np.ndarray, waiting: bool) -> int:
        """Take from ``ready`` [slots] bool the slots that other steps have; how many that decode this one may have.
        todo [slots]: tokens to compute. waiting: requests wait for a slot."""
        return len(ready)

    def planned(self, t: RequestTable, slots: np.ndarray, in_flight: np.ndarray, samples: np.ndarray) -> int:
        """A step of these slots was planned. How many of the newest steps in flight it takes no token of."""
        return 0

    def committed(self) -> None:
        """A step has its result."""


class PipelineShare(StageShare):
    """depth: steps that run at once, none of which needs the tokens of another one. min_batch_per_stage: sequences that
    stay in one step, as it takes nearly as long with a part of them."""

    def __init__(self, depth: int, min_batch_per_stage: int) -> None:
        self._depth, self._least = depth, min_batch_per_stage
        self._planned = self._committed = 0  # steps

    def choose(self, t: RequestTable, ready: np.ndarray, todo: np.ndarray, waiting: bool) -> int:
        running = len(t.running)
        prompts = np.count_nonzero(ready & (todo > 1))
        ready &= self._apart(t, bool(prompts) or (waiting and t.has_free_slot))
        return max(-(-running // self._depth), self._least)

    def _apart(self, t: RequestTable, computing: bool) -> np.ndarray:
        """Which slots may be in the next step: one whose token is in flight is left out until as many steps have begun
        as there are stages, so that none waits for another one's tokens. Few sequences stay together, each step after
        the one before, unless there are prompts to compute in between; the host is a step ahead of them."""
        known = t.num_in_flight == 0
        if len(t.running) > self._least or computing:
            return known | (self._planned + 1 - t.sampled_at >= self._depth)
        return known if self._planned - self._committed > 1 else np.ones_like(known)

    def planned(self, t: RequestTable, slots: np.ndarray, in_flight: np.ndarray, samples: np.ndarray) -> int:
        flying = t.sampled_at[slots[in_flight > 0]]
        independent = min(self._depth - 1, self._planned - int(flying.max(initial=0)))
        self._planned += 1
        t.sampled_at[slots[samples]] = self._planned
        return independent

    def committed(self) -> None:
        self._committed += 1
