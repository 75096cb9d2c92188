"""Encoded inputs, such as images: an encoder writes their rows before the step that reads them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from graphllm.engine.cache.item_cache import ItemCache, check_items
from graphllm.engine.parts.part import Kept, Part, PartContext
from graphllm.engine.requests.request import EngineRequest
from graphllm.engine.schedule.item_rows import ItemRows
from graphllm.engine.schedule.scheduler_output import SchedulerOutput
from graphllm.runtime.commands.command import Command
from graphllm.runtime.commands.items import Encode


class Items(Part):
    """resource: says where rows lie, and lets a request join when there is room for its own."""

    name = "items"

    def __init__(self, context: PartContext) -> None:
        super().__init__(context)
        self.resource = self._rows = ItemRows(
            ItemCache(context.executor.layout.item_tokens, context.scheduler.cache.caching)
        )

    def receive(self, request: EngineRequest) -> EngineRequest:
        if request.items:
            check_items(request, *self.context.executor.item_input)
        return request

    def before(self, plan: SchedulerOutput) -> Iterable[Command]:
        return [
            Encode(np.frombuffer(item.data, item.dtype).reshape(item.shape), item.length, start)
            for item, start in self._rows.encodes()
        ]

    def reset(self, where: Kept) -> None:
        self._rows.cache.reset()
