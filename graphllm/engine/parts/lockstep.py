"""Cores that share experts make their steps together; one without requests runs steps of padding."""

from __future__ import annotations

from graphllm.engine.experts.lockstep import CoreWaves
from graphllm.engine.parts.part import Part, PartContext
from graphllm.engine.step.batch import Batch
from graphllm.runtime.memory.staging import ragged

_NOTHING = ragged([[0]], [0])  # a step of padding only, which writes to what is no request's


class Lockstep(Part):
    """Pads each step to the largest of all cores."""

    name = "lockstep"

    def __init__(self, context: PartContext) -> None:
        super().__init__(context)
        assert context.setup.waves is not None
        self._waves: CoreWaves = context.setup.waves
        self.wakeup_fd = self._waves.bell

    @classmethod
    def applies(cls, context: PartContext) -> bool:
        return context.setup.waves is not None

    @property
    def busy(self) -> bool:  # type: ignore[override]
        return self._waves.running

    def added(self) -> None:
        self._waves.begin()

    def hear(self) -> None:
        self._waves.hear()

    def adjust(self, batch: Batch | None) -> Batch | None:
        """A step as all cores make it, padded to the tokens of the largest one. A step of padding only starts here."""
        if not self._waves.running:
            return batch
        step = None if batch is None else batch.step
        mixed = step is not None and not step.query_len
        busy = self.context.scheduler.unfinished > 0
        agreed = self._waves.agree(0 if step is None else step.tokens, mixed, busy)
        if batch is None or step is None:
            if agreed.tokens:
                nothing = _NOTHING._replace(pad_to=agreed.tokens, query_len=0 if agreed.mixed else 1)
                task = self.context.executor.task
                self.context.executor.start(nothing, "plain" if task == "generate" else task)
            return None
        query_len = 0 if agreed.mixed else step.query_len
        return batch._replace(step=step._replace(pad_to=agreed.tokens, query_len=query_len))

    def explain(self, failure: RuntimeError) -> Exception:
        return self._waves.explain(failure)

    def check_health(self) -> None:
        self._waves.check()

    def close(self) -> None:
        self._waves.close()
