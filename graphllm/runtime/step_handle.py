"""StepHandle and StepResult: a step that was started, and what it gave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from graphllm.runtime.drafting import NO_DRAFTS, DraftRuns
from graphllm.runtime.graphs import BoundProgram
from graphllm.runtime.memory.memory import Array
from graphllm.runtime.memory.padding import Size
from graphllm.runtime.memory.staging import StepInput
from graphllm.runtime.staged_stream import StagedStream
from graphllm.runtime.stream import Job


class StepResult(NamedTuple):
    """What a step gave, on the host.

    outputs: by name, the results that every step copies, and results that were asked for: tokens [R] int32 (-1 where
        none can be chosen), scores (see `token_logprobs`), pooled [R, D] and so on.
    whole: by row, log-probabilities [V] of the model's own distribution, for the rows that asked for all.
    logits [R, V]: a view of device memory that the next step overwrites; None for a task without logits.
    """

    outputs: Mapping[str, np.ndarray]
    whole: dict[int, np.ndarray]
    logits: Array | None

    @property
    def tokens(self) -> np.ndarray:
        """Of the task "generate"."""
        return self.outputs["tokens"]


class StepHandle:
    """A step that was started. ``wait`` gives its results, once.

    size: what it is padded to.
    jobs: one for each stretch of the step, in order.
    drafts: the draft graph's runs after it.
    more: further states that are copied to the host, by the name of the output.
    """

    def __init__(
        self, step: StepInput, buffer_index: int, size: Size, variant: str, program: BoundProgram,
        stream: StagedStream, launch: Callable[[StepHandle, Callable[[], None]], Job],
    ) -> None:  # fmt: skip
        self.rows, self.counts = step.rows, {"T": step.tokens, "S": step.sequences, "R": step.rows}
        self.buffer_index, self.size, self.variant, self.program = buffer_index, size, variant, program
        self.jobs: list[Job] = []
        self._stream, self._launch = stream, launch
        self.drafts: DraftRuns = NO_DRAFTS
        self.more: Mapping[str, Array] = {}
        self.outputs: dict[str, np.ndarray] = {}
        self.whole: dict[int, Callable[[], np.ndarray]] = {}

    def launch(self, work: Callable[[], None]) -> None:
        """Launch a part of the step."""
        job = self._launch(self, work)
        self.jobs.append(job)
        self.drafts.belong_to(job)

    def settle(self) -> None:
        """Block until the step is done; its results lie in ``outputs`` until the second step after it starts. Raises
        what the device reported."""
        self._stream.settle(self)
        for job in self.jobs:
            job.result()

    def wait(self) -> StepResult:
        """Block until the step is done. Raises what the device reported."""
        self.settle()
        logits = self.program.results.get("logits")
        return StepResult(
            {name: values.copy() for name, values in self.outputs.items()},
            {row: read() for row, read in self.whole.items()},
            None if logits is None else logits[: self.rows],
        )
