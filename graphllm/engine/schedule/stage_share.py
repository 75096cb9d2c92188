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
    """Divides the running sequences among the steps of a pipeline.

    depth: steps that run at once; no step needs the tokens of another.
    min_batch_per_stage: fewer sequences than this are not split; a smaller step is hardly faster.
    """

    def __init__(self, depth: int, min_batch_per_stage: int) -> None:
        self._depth, self._least = depth, min_batch_per_stage
        self._planned = self._committed = 0  # steps

    def choose(self, t: RequestTable, ready: np.ndarray, todo: np.ndarray, waiting: bool) -> int:
        running = len(t.running)
        prompts = np.count_nonzero(ready & (todo > 1))
        ready &= self._apart(t, bool(prompts) or (waiting and t.has_free_slot))
        return max(-(-running // self._depth), self._least)

    def _apart(self, t: RequestTable, computing: bool) -> np.ndarray:
        """Slots that may join the next step. A slot with a token in flight waits until as many steps have begun as
        there are stages, so that no step waits for another step's tokens. Few sequences stay together, one step after
        the other, unless there are prompts to compute in between; the host is a step ahead of them."""
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
