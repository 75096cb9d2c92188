"""The vectors of a step, given to the requests that end with it."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from graphllm.engine.requests.request import EngineCoreOutput
from graphllm.engine.schedule.scheduler_output import SchedulerOutput


class PooledVectors:
    """Vectors of running prompts. per_token: every token has a vector, and a prompt's vectors may come in parts."""

    def __init__(self, per_token: bool) -> None:
        self._per_token = per_token
        self._parts: dict[str, list[np.ndarray]] = {}

    def give(self, step: SchedulerOutput, pooled: np.ndarray, ending: Collection[EngineCoreOutput]) -> None:
        """Put a step's vectors into the outputs of the requests that end with it: the vector of the last row, or the
        vectors of all tokens."""
        if not self._per_token:
            ends = dict(zip((s.request.id for s in step.requests), np.cumsum(step.rows), strict=True))
            for output in ending:
                output.pooled = pooled[ends[output.id] - 1].astype(np.float32).tobytes()
            return
        done = {output.id: output for output in ending}
        parts = np.split(pooled.astype(np.float32), np.cumsum(step.counts)[:-1])
        for state, start, part in zip(step.requests, step.starts.tolist(), parts, strict=True):
            name = state.request.id
            if state.finish_reason is not None and name not in done:  # aborted
                continue
            if start == 0:  # also where a request was preempted and begins anew
                self._parts[name] = []
            self._parts.setdefault(name, []).append(part)
        for name, output in done.items():
            output.pooled = b"".join(part.tobytes() for part in self._parts.pop(name))

    def forget(self, name: str) -> None:
        """A request that ended otherwise."""
        self._parts.pop(name, None)
