"""HostResults: copies of a step's results on the host, in memory of each step in flight."""

from __future__ import annotations

from collections.abc import Mapping

from graphllm.runtime.graphs import GraphPrograms
from graphllm.runtime.memory.memory import Array, Memory
from graphllm.runtime.step_handle import StepHandle


class HostResults:
    """graph: copies its results. in_flight: steps that may have results at once."""

    def __init__(self, memory: Memory, graph: GraphPrograms, in_flight: int) -> None:
        self._memory, self._graph = memory, graph
        self._kept: list[dict[str, Array]] = [{} for _ in range(in_flight)]

    def copy(self, handle: StepHandle, wanted: Mapping[str, str | int]) -> None:
        """Copy results into ``handle.outputs``, in the order of the current stream. wanted: by name, the symbol of
        their rows, T, S or R, or a number of rows."""
        for name, symbol in wanted.items():
            count = symbol if isinstance(symbol, int) else handle.counts[symbol]
            if name in handle.program.on_host:
                handle.outputs[name] = handle.program.on_host[name][:count].copy()
                continue
            result = handle.program.results[name]
            if name not in self._kept[handle.buffer_index]:  # of all steps: a GPU may wait for all that it does
                most = symbol if isinstance(symbol, int) else self._graph.most[symbol]
                for kept in self._kept:
                    kept[name] = self._memory.read_into(result, (most, *result.shape[1:]))
            part = self._kept[handle.buffer_index][name][:count]
            part.copy_(result[:count], non_blocking=True)
            handle.outputs[name] = part.numpy()

    def copy_states(self, handle: StepHandle) -> None:
        """Copy the states that the step wants whole."""
        kept = self._kept[handle.buffer_index]
        for name, state in handle.more.items():
            if name not in kept:
                kept[name] = self._memory.read_into(state, state.shape)
            kept[name].copy_(state, non_blocking=True)
            handle.outputs[name] = kept[name].numpy()
