"""Taking the model's own code when it has been compiled behind an engine that began with prebuilt kernels."""

from __future__ import annotations

import logging

from graphllm.engine.parts.part import Part, PartContext
from graphllm.engine.requests.request import EngineCoreOutput, EngineRequest

_log = logging.getLogger(__name__)


class Takeover(Part):
    """When a request comes and none is there, the executor takes the new programs: no answer is of both."""

    name = "takeover"

    def __init__(self, context: PartContext) -> None:
        super().__init__(context)
        self._successor = context.setup.successor
        if self._successor is not None:
            self._successor.begin(context.executor.prepare)

    @classmethod
    def applies(cls, context: PartContext) -> bool:
        return context.setup.successor is not None

    def receive(self, request: EngineRequest) -> EngineRequest | EngineCoreOutput | None:
        if self._successor is not None and not self.context.scheduler.unfinished:
            found = self._successor.ready()
            if found is not None:
                self.context.executor.take(found)
                _log.info("the model's own code is compiled, and runs from here on (%s)", found.folder)
                self.close()
        return request

    def close(self) -> None:
        if self._successor is not None:
            self._successor.close()
            self._successor = None
