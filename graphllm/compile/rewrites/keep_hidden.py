"""Graph rewrite: units that leave the hidden states of layers for a draft graph, which reads them after the step."""

from __future__ import annotations

from graphllm.compile.tasks.draft_family import check_width
from graphllm.compile.tasks.draft_rows import hidden_states
from graphllm.compile.tasks.generate import Generate
from graphllm.compile.tasks.task import TaskUnit, Values
from graphllm.compile.trace import TracedGraph
from graphllm.config import CompileConfig
from graphllm.ops.rows.store_rows import store_rows
from graphllm.weights.plan.plan import WeightPlan


def keep_hidden(graph: TracedGraph, plan: WeightPlan, config: CompileConfig) -> TracedGraph:
    """A unit after each layer that the draft graph reads a hidden state of. Raises ConfigError for another width."""
    hidden = graph.task.hidden if isinstance(graph.task, Generate) else None
    if hidden is None:
        return graph
    check_width(hidden, graph.carried["x"].shape[-1])
    units, after = {}, dict[int, tuple[str, ...]]()
    for layer, state in zip(hidden.layers, hidden_states(hidden), strict=True):
        keep = _unit(state)
        units[keep.name] = graph.tracer.unit(keep, graph.carried)
        after[layer] = (*after.get(layer, ()), keep.name)
    return graph.with_units(units, after)


def _unit(state: str) -> TaskUnit:
    def run(v: Values) -> tuple[()]:
        store_rows(v["x"], v[f"state.{state}"])
        return ()

    return TaskUnit(f"keep_{state}", run, ())
