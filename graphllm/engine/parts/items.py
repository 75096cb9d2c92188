"""Encoded inputs, such as images: an encoder writes their rows before the step that reads them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from graphllm.engine.cache.item_cache import check_items
from graphllm.engine.parts.part import Part
from graphllm.engine.requests.request import EngineRequest
from graphllm.engine.schedule.scheduler_output import SchedulerOutput
from graphllm.runtime.commands.command import Command
from graphllm.runtime.commands.items import Encode


class Items(Part):
    """Where rows lie, the scheduler's `ItemCache` says."""

    name = "items"

    def receive(self, request: EngineRequest) -> EngineRequest:
        if request.items:
            check_items(request, *self.context.executor.item_input)
        return request

    def before(self, plan: SchedulerOutput) -> Iterable[Command]:
        return [
            Encode(np.frombuffer(item.data, item.dtype).reshape(item.shape), item.length, start)
            for item, start in plan.encodes
        ]

    def reset(self) -> None:
        self.context.scheduler.items.reset()
