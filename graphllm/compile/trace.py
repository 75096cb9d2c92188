"""Trace a model: of each graph embed, one layer of each type and head, and the units of its task, each once, on fake
tensors with symbolic T, S and R."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from graphllm.compile.layout import Layout
from graphllm.compile.tasks.task import Task, TaskUnit
from graphllm.ir.graph import GraphError, Shapes, TensorSpec, eliminate_dead
from graphllm.ir.model import AttentionMetadata, ForwardContext, Graph
from graphllm.ir.weight import Weight
from graphllm.program.specs import OutputSpec
from graphllm.rewrite import Unit, results_of

# How many blocks there are is known when the artifact is loaded, and no piece depends on it. It is larger than 1, else
# it would be mistaken for a broadcast.
_BLOCKS = 64


class Program(NamedTuple):
    """One program of a graph.

    units: in order. "layers" stands for all layers, "context" for what a draft graph keeps for each of its layers.
    parts: the parts that begin with some units, by the units' names.
    results: the values that must be there in the end.
    """

    units: tuple[str, ...]
    parts: dict[str, str]
    results: tuple[OutputSpec, ...]


class TracedGraph(NamedTuple):
    """A graph as units.

    task: what it is compiled for.
    units: by their short names ("embed", "layer.<type>", "head" ...).
    programs: by name.
    layer_types: of each layer.
    after_layer: by a layer's index, the units that follow it, in order.
    vector: see `Task.vector`.
    tracer: traces further units.
    """

    task: Task
    units: dict[str, Unit]
    programs: dict[str, Program]
    layer_types: tuple[str, ...]
    after_layer: dict[int, tuple[str, ...]]
    vector: tuple[str, int]
    tracer: UnitTracer

    @property
    def graph(self) -> Graph:
        """As the family declares it."""
        return self.task.graph

    @property
    def carried(self) -> dict[str, TensorSpec]:
        """What layers hand on: x and what embed shares."""
        return _made(self.units["embed"])

    def with_units(self, added: Mapping[str, Unit], after_layer: Mapping[int, tuple[str, ...]]) -> TracedGraph:
        """The graph with further units, and with units that follow its layers."""
        after = {i: (*names, *after_layer.get(i, ())) for i, names in self.after_layer.items()}
        return self._replace(units={**self.units, **added}, after_layer=after)


def trace_model(layout: Layout) -> Iterator[TracedGraph]:
    """The units of every graph, each traced when it is asked for: a rewrite of the main graph can refuse what a draft
    graph would fail with."""
    shapes = Shapes(layout.tasks[0].config.target.device)
    for i, task in enumerate(layout.tasks):
        yield trace_graph(task, UnitTracer(task, layout, i, shapes))


def trace_graph(task: Task, tracer: UnitTracer) -> TracedGraph:
    """Each unit in program order: what comes before embed, embed, each layer type once, head, and what follows it."""
    graph, c, units = task.graph, task.c, dict[str, Unit]()

    def trace(name: str, *given: Any, **more: Any) -> Unit:
        units[name] = tracer.trace(name, *given, **more)
        return units[name]

    programs = task.programs(tracer.inputs.values(), tracer.caches())
    resolved: dict[str, TensorSpec] = {}
    for unit in dict.fromkeys(unit for program in programs.values() for unit in program.before):
        resolved |= _made(trace(unit.name, tracer.weights(dict(unit.weights)), unit.run, unit.outputs))
        tracer.resolve(resolved)
    embed = trace("embed", tracer.weights(graph.embed_weights(c)), tracer.embed)
    carried = _made(embed)
    layer_types = graph.layer_types(c)
    for layer_type in dict.fromkeys(layer_types):
        layers = tuple(i for i, t in enumerate(layer_types) if t == layer_type)
        read = tracer.of_layer(layer_type, layers[0], carried)
        trace(f"layer.{layer_type}", read, tracer.layer(layer_type), layers=layers)
        if graph.context is not None:
            trace(f"context.{layer_type}", read, tracer.kept_of_layer(layer_type), (), layers)
    head = trace("head", tracer.weights(graph.head_weights(c)) | carried, tracer.head, task.head_outputs)
    values = carried | resolved | _made(head)
    for unit in dict.fromkeys(unit for program in programs.values() for unit in program.after):
        states = {name: tracer.state(name) for name in unit.states}
        values |= _made(trace(unit.name, values | states, unit.run, unit.outputs))
    declared, traced = task.outputs(output_specs(head)), {}
    for name, program in programs.items():
        there = {*task.head_outputs, *(n for unit in program.after for n in unit.outputs)} - {*program.not_results}
        traced[name] = Program(
            (*(unit.name for unit in program.before), *program.own, *(unit.name for unit in program.after)),
            {unit.name: unit.part for unit in program.after if unit.part},
            tuple(output for output in declared if output.name in there),
        )
    nothing: dict[int, tuple[str, ...]] = dict.fromkeys(range(len(layer_types)), ())
    return TracedGraph(task, units, traced, layer_types, nothing, task.vector(output_specs(head)), tracer)


class UnitTracer:
    """Traces units of one graph. inputs: of the graph, by name."""

    def __init__(self, task: Task, layout: Layout, number: int, shapes: Shapes) -> None:
        self._task, self._layout, self._number, self._shapes = task, layout, number, shapes
        self.inputs = layout.inputs[number]
        layer_states = {name for graph in layout.layers for layer in graph for name in layer.values()}
        self._read = {f"step.{n}": TensorSpec.contiguous(s.dtype, *s.shape) for n, s in self.inputs.items()}
        self._states = {n: self.state(n) for n in layout.states if n not in layer_states}

    def trace(
        self,
        name: str,
        read: Mapping[str, TensorSpec],
        fn: Callable[[dict[str, Any]], tuple[Tensor, ...]],
        outputs: tuple[str, ...] = ("x",),
        layers: tuple[int, ...] = (),
    ) -> Unit:
        """A unit. read: what it may read, in addition to the graph's inputs and the states of no layer."""
        inputs, prefix = {**self._read, **self._states, **read}, self._task.graph.prefix
        return trace_unit(prefix + name, inputs, fn, self._shapes, outputs, layers)._replace(prefix=prefix)

    def unit(self, unit: TaskUnit, read: Mapping[str, TensorSpec]) -> Unit:
        """A task's unit."""
        return self.trace(unit.name, read, unit.run, unit.outputs)

    def resolve(self, values: Mapping[str, TensorSpec]) -> None:
        """Later units read these values in place of the inputs of the same names."""
        self._read |= {n: spec for n, spec in values.items() if n.startswith("step.")}

    def caches(self) -> list[tuple[str, int]]:
        """The keys and values of the graph's layers, by their names in programs, each with its cache group."""
        layers, groups = self._layout.layers[self._number], self._layout.groups[self._number]
        states = self._layout.states
        return [
            (name, group)
            for own, group in zip(layers, groups, strict=True)
            for name in own.values()
            if states[name].axis == "block"
        ]

    def of_layer(self, layer_type: str, layer: int, carried: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """What a layer reads: its weights, what layers hand on, its states and its block table. Linking puts the states
        and the table of each layer in the place of this one's."""
        own = self._layout.layers[self._number][layer]
        states = {f"state.{n}": self.state(name) for n, name in own.items()}
        found = {**self.weights(self._task.graph.layer_weights(self._task.c, layer_type)), **carried, **states}
        if self._layout.blocks.groups:
            found["step.block_table"] = self._read[f"step.block_table.{self._layout.groups[self._number][layer]}"]
        return found

    def embed(self, v: dict[str, Any]) -> tuple[Tensor, ...]:
        """Run the graph's embed."""
        x, shared = self._task.graph.embed(self._task.c, _weights(v), _context(v))
        return (x, *shared)

    def layer(self, layer_type: str) -> Callable[[dict[str, Any]], tuple[Tensor]]:
        """What runs a layer of a type."""
        graph, c = self._task.graph, self._task.c
        return lambda v: (graph.layer(c, layer_type, _weights(v), v["x"], _context(v)),)

    def kept_of_layer(self, layer_type: str) -> Callable[[dict[str, Any]], tuple[()]]:
        """What runs the context function of a draft graph's layer."""
        context, c = self._task.graph.context, self._task.c
        assert context is not None

        def run(v: dict[str, Any]) -> tuple[()]:
            context(c, layer_type, _weights(v), _context(v))
            return ()

        return run

    def head(self, v: dict[str, Any]) -> tuple[Tensor, ...]:
        """Run the graph's head."""
        return self._task.head(self._task.graph.head(self._task.c, _weights(v), v["x"], _context(v)), v)

    def weights(self, declared: Mapping[str, Weight]) -> dict[str, TensorSpec]:
        """Parameters as values that a unit may read."""
        dtypes = {"model": self._task.config.dtype, "float32": "float32"}
        return {f"w.{n}": TensorSpec.contiguous(dtypes[w.dtype], *w.shape) for n, w in declared.items()}

    def state(self, name: str) -> TensorSpec:
        """A state, by its name in programs."""
        place = self._layout.states[name]
        return TensorSpec(place.dtype, (self._layout.entries.get(place.counted, _BLOCKS), *place.shape), place.stride)


def trace_unit(
    name: str,
    inputs: Mapping[str, TensorSpec],
    fn: Callable[[dict[str, Any]], tuple[Tensor, ...]],
    shapes: Shapes,
    outputs: tuple[str, ...] = ("x",),
    layers: tuple[int, ...] = (),
) -> Unit:
    """Trace ``fn`` over named inputs. Inputs it does not read are left out of the unit.

    outputs: names of the first results; further ones are "shared.<i>". layers: see `Unit`.
    """
    names = list(inputs)
    fakes = [shapes.named(n, inputs[n]) for n in names]
    with shapes.mode, torch.no_grad():
        traced = make_fx(lambda *values: fn(dict(zip(names, values, strict=True))))(*fakes)
    if fixed := shapes.fixed():
        raise GraphError(f"tracing {name} made {fixed}: an op's reference or a model function needs a size as a number")
    graph = traced.graph
    for node, label in zip(list(graph.find_nodes(op="placeholder")), names, strict=True):
        node.meta["label"] = label
    for node in graph.nodes:
        node.meta.setdefault("val", None)  # of an op that only writes
    eliminate_dead(graph)
    unit = Unit(name, graph, (), shapes, layers=layers)
    shared = tuple(f"shared.{i}" for i in range(len(results_of(unit)) - len(outputs)))
    return unit._replace(outputs=(*outputs, *shared))


def output_specs(unit: Unit) -> list[TensorSpec]:
    """The specs of a unit's outputs."""
    return [unit.shapes.spec(n.meta["val"]) for n in results_of(unit)]


def _made(unit: Unit) -> dict[str, TensorSpec]:
    return dict(zip(unit.outputs, output_specs(unit), strict=True))


def _context(v: Mapping[str, Any]) -> ForwardContext:
    inputs = {n.removeprefix("step."): t for n, t in v.items() if n.startswith("step.")}
    attn = AttentionMetadata(inputs.get("block_table"), inputs["query_start_loc"], inputs["seq_lens"])  # type: ignore[arg-type]
    states = {n.removeprefix("state."): t for n, t in v.items() if n.startswith("state.")}
    shared = tuple(t for n, t in v.items() if n.startswith("shared."))
    return ForwardContext(SimpleNamespace(**inputs), SimpleNamespace(**states), attn, shared)


def _weights(values: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**{n[2:]: v for n, v in values.items() if n.startswith("w.")})
