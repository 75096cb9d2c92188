"""The command that runs the encoder graph on an item, such as an image."""

from __future__ import annotations

import numpy as np

from graphllm.runtime.commands.command import Command, Device
from graphllm.runtime.memory.staging import StepInput, ragged


class Encode(Command):
    """Run the encoder graph on an item's data.

    data: what the graph's inputs with the provider "item" take, a row for each token.
    length: rows of the item states that it writes.
    start: the first of these rows.
    """

    data: np.ndarray
    length: int
    start: int

    def run(self, device: Device) -> None:
        graph, T = device.encoder, len(self.data)
        assert graph is not None
        given = {name: self.data for name, spec in graph.inputs.items() if spec.provider == "item"}
        rows = {"item_rows": np.arange(self.start, self.start + self.length, dtype=np.int32)}
        step = ragged([[0] * T], [0])
        step = StepInput(T, 1, 1, 0, {**step.arrays, **given, **rows})
        size, index = graph.pick(step), graph.next_buffer()
        graph.staging.fill(index, step, size.symbols)
        bound = graph.bound("encode", size)

        def work() -> None:
            graph.staging.upload(index, size.symbols)
            bound.run()

        graph.jobs[index] = device.stream.submit(work)
