"""StagedStream: the order in which a pipeline stage launches its work.

A step is its layers and what follows them. The last stage makes the logits; every other stage must wait for them before
it can sample. A stage therefore launches what follows a step's layers together with a later step, after the layers of
that step: until then the stage can compute. With one stage nothing is ever held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from graphllm.runtime.stream import Job, Stream, nothing

Work = Callable[[], None]


class StagedStep(Protocol):
    """A step that was started."""

    def launch(self, work: Work) -> None:
        """Launch a part of it."""


class StagedStream:
    """A stream of one stage. stages: of the pipeline; as many steps may be at different stages at once."""

    def __init__(self, stream: Stream, stages: int) -> None:
        self.stream, self.stages = stream, stages
        self.announce: Callable[[int], None] = lambda keep: None  # called with each `follow`
        self._held: deque[tuple[StagedStep, list[Work]]] = deque()

    def submit(self, work: Callable[[], Any]) -> Job:
        """Launch work that no stage waits in."""
        return self.stream.submit(work)

    def hold(self, step: StagedStep, work: Work) -> None:
        """Keep what follows the layers of a step for later."""
        self._held.append((step, [work]))

    def is_held(self, step: StagedStep) -> bool:
        """Whether what follows the layers of a step is kept for later."""
        return any(other is step for other, _ in self._held)

    def then(self, step: StagedStep, work: Work) -> None:
        """Launch the next part of a step, or keep it if what comes before it is kept."""
        held = next((works for other, works in self._held if other is step), None)
        if held is None:
            step.launch(work)
        else:
            held.append(work)

    def release(self, keep: int) -> None:
        """Launch what follows the layers of all steps but the ``keep`` newest."""
        while len(self._held) > keep:
            step, works = self._held.popleft()
            for work in works:
                step.launch(work)

    def follow(self, keep: int) -> None:
        """As `release`, on all ranks: all of them have the same order."""
        self.announce(keep)
        self.release(keep)

    def settle(self, step: StagedStep) -> None:
        """Launch all of a step, on all ranks."""
        for number, (other, _) in enumerate(self._held):
            if other is step:
                self.follow(len(self._held) - 1 - number)
                return

    def in_order(self, work: Work) -> None:
        """Launch work after all parts of the steps so far: a slot that a request has left is still written by them."""
        self.release(0)
        self.stream.submit(work)

    def drain(self) -> None:
        """With several stages, wait until all steps are done, and what this stage has sent is taken."""
        if self.stages > 1:
            from graphllm.ir.groups import links_of

            self.release(0)
            self.stream.submit(links_of(self.stages).settle).result()

    def synchronize(self) -> None:
        """Wait for everything so far."""
        self.release(0)
        self.stream.submit(nothing).result()

    def close(self) -> None:
        """Wait for what was launched, and forget the rest."""
        self.stream.close()
        self._held.clear()
