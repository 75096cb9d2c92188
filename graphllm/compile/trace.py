"""Trace a model: of each graph embed, one layer of each type and head, and the sampling units around it, each once, on
fake tensors with symbolic T, S and R."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from graphllm.compile.tasks import drafting, expert_counts, sampling, trees
from graphllm.compile.tasks.expert_counts import ExpertCounter
from graphllm.compile.tasks.sampling import Stage
from graphllm.config import CompileConfig, ConfigError
from graphllm.config.token_tree import DynamicTree
from graphllm.ir.graph import GraphError, Shapes, TensorSpec, eliminate_dead
from graphllm.ir.model import AttentionMetadata, ForwardContext, Graph, Hidden, Model
from graphllm.ir.weight import Weight
from graphllm.program.specs import InputSpec, OutputSpec, StateSpec
from graphllm.program.states import BlockPlan, StatePlace, layer_places, own_place, plan_blocks
from graphllm.rewrite import PassReport, Unit, results_of

# How many blocks there are is known when the artifact is loaded, and no piece depends on it. It is larger than 1, else
# it would be mistaken for a broadcast.
_BLOCKS = 64


class Layout(NamedTuple):
    """Everything a model's graphs read and leave, planned before they are traced.

    blocks: the pool of block states, over the layers of all graphs in their order.
    states: where each state lies, by its name in programs.
    entries: of each axis but "block", how many.
    layers: for each graph, the states of each layer by the layer's own names for them.
    inputs: of each graph, by name.
    versions: of recurrent states, one for each token of a verification step.
    groups: the cache group of each graph's layers, 0 for layers without one.
    """

    blocks: BlockPlan
    states: dict[str, StatePlace]
    entries: dict[str, int]
    layers: list[list[dict[str, str]]]
    inputs: list[dict[str, InputSpec]]
    versions: int
    groups: list[list[int]]


class Program(NamedTuple):
    """The units of a program in order, and the parts that begin with some. "layers" stands for all of them, "context"
    for what a draft graph keeps for each of its layers.

    results: the values that must be there in the end.
    """

    units: tuple[str, ...]
    parts: dict[str, str]
    results: tuple[OutputSpec, ...]


class TracedGraph(NamedTuple):
    """A graph's units and programs.

    units: by their short names ("embed", "layer.<type>", "head" ...).
    programs: by name.
    behind: units that follow a layer, by its index, in order.
    vector: of the task "pool", see `StepExecutor`.
    """

    graph: Graph
    units: dict[str, Unit]
    programs: dict[str, Program]
    layer_types: tuple[str, ...]
    behind: dict[int, list[str]]
    vector: tuple[str, int] = ("R", 0)


def base_inputs(config: CompileConfig, groups: Sequence[Any]) -> dict[str, InputSpec]:
    """What every graph may read; see `ForwardContext`. A block table is exactly max_model_len wide."""
    specs = [
        InputSpec("token_ids", ("T",)),
        InputSpec("positions", ("T",)),
        InputSpec("context_lens", ("T",), shareable=False),
        InputSpec("logits_indices", ("R",)),
        InputSpec("query_start_loc", ("S + 1",), padding="last"),
        InputSpec("seq_lens", ("S",)),
        InputSpec("slots", ("S",), neutral=config.max_num_seqs),
    ]
    for number, group in enumerate(groups):
        width = -(-config.max_model_len // group.block_size)
        specs.append(InputSpec(f"block_table.{number}", ("S", width), provider="block_table", ragged=True))
    return {s.name: s for s in specs}


def plan_layout(model: Model, c: Any, config: CompileConfig) -> Layout:
    """Where the states that a family declares lie, and the inputs of its graphs. Raises ConfigError for states that
    contradict each other."""
    per_graph = [
        [tuple(_typed(s, config) for s in graph.states(c, layer_type)) for layer_type in graph.layer_types(c)]
        for graph in model.graphs
    ]
    layers = [states for graph in per_graph for states in graph]
    if config.kv_cache_dtype != "auto" and not any(
        s.dtype == "cache" for graph in model.graphs for t in set(graph.layer_types(c)) for s in graph.states(c, t)
    ):
        raise ConfigError(
            f"kv_cache_dtype is {config.kv_cache_dtype}: this model has no keys and values to round; use auto"
        )
    trees.check_tree(model, c, config, layers)
    blocks = plan_blocks(layers, config.block_size, config.max_model_len)
    versions = config.longest_query
    states: dict[str, StatePlace] = {}
    names: list[list[dict[str, str]]] = []
    groups: list[list[int]] = []
    number = 0
    for graph, declared in zip(model.graphs, per_graph, strict=True):
        names.append([])
        groups.append([])
        for i, of_layer in enumerate(declared):
            places = layer_places(of_layer, blocks, number, versions)
            named = {n: f"state.{graph.prefix}layers.{i}.{n}" for n in places}
            states |= {named[n]: place for n, place in places.items()}
            names[-1].append(named)
            place = blocks.places[number]
            groups[-1].append(place[0] if place else 0)
            number += 1
    own = [*(_typed(s, config) for s in model.states(c))]
    if any(graph.task == "generate" for graph in model.graphs):
        own += sampling.states(config, c.V, versions)
    for graph in (g for g in model.graphs if g.task == "draft"):
        if versions == 1:
            raise ConfigError("num_speculative_tokens is 0: say how many tokens the draft model is to guess")
        if config.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_max is {config.prompt_lookup_max}, but drafts come from a draft model; leave one out"
            )
        own += [_typed(s, config) for s in drafting.states(drafting.reads(graph, model.graphs[0], c), config, c.V)]
    if drafting.draws(config) and not any(graph.task == "draft" for graph in model.graphs):
        raise ConfigError("draft_sample_method is probabilistic, but there is no draft model that draws; use greedy")
    states |= {f"state.{s.name}": own_place(s, versions) for s in own}
    inputs = []
    for graph in model.graphs:
        specs = base_inputs(config, blocks.groups) | {s.name: _with_provider(s) for s in graph.inputs(c)}
        if graph.task == "generate":
            specs |= {s.name: s for s in sampling.inputs(config, c.V)}
        elif graph.task == "draft":
            specs |= {s.name: s for s in drafting.inputs(config)}
        inputs.append(specs)
    entries = {
        "slot": config.max_num_seqs + 1,
        "token": max(b.limits(config.max_num_seqs)["T"] for b in config.buckets),
        "item": config.item_tokens + 1,
        "adapter": config.max_loras + 1,
    }
    return Layout(blocks, states, entries, names, inputs, versions, groups)


def with_added(
    layout: Layout, graphs: Sequence[TracedGraph], added: Iterable[tuple[Unit, PassReport]], config: CompileConfig
) -> Layout:
    """The layout with the states and inputs that passes added to units."""
    states, layers, inputs = dict(layout.states), [[*graph] for graph in layout.layers], [*layout.inputs]
    for unit, report in added:
        number = next(i for i, g in enumerate(graphs) if g.graph.prefix == unit.prefix)
        inputs[number] = inputs[number] | {s.name: s for s in report.inputs}
        for state in report.states:
            place = own_place(_typed(state, config), layout.versions)
            if not unit.layers:
                states[f"state.{state.name}"] = place
            for i in unit.layers:
                name = f"state.{unit.prefix}layers.{i}.{state.name}"
                states[name] = place
                layers[number][i] = layers[number][i] | {state.name: name}
    return layout._replace(states=states, layers=layers, inputs=inputs)


def _with_provider(spec: InputSpec) -> InputSpec:
    if not spec.provider:
        raise ConfigError(f"the model's input {spec.name!r} has no provider: give the name of what fills it")
    return spec


def _typed(state: StateSpec, config: CompileConfig) -> StateSpec:
    return state.typed(config.dtype, config.cache_dtype)


def trace_model(model: Model, c: Any, config: CompileConfig, layout: Layout) -> list[TracedGraph]:
    """The units of every graph, each in program order: what resolves token ids, embed, each layer type once, head, and
    the units of its programs after the head."""
    shapes = Shapes(config.target.device)
    drafter = next((graph for graph in model.graphs if graph.task == "draft"), None)
    hidden = None if drafter is None else drafting.reads(drafter, model.graphs[0], c)
    return [
        _Tracer(graph, c, config, layout, i, shapes).graph(drafter is not None, hidden)
        for i, graph in enumerate(model.graphs)
    ]


class _Tracer:
    def __init__(
        self, graph: Graph, c: Any, config: CompileConfig, layout: Layout, number: int, shapes: Shapes
    ) -> None:
        self._graph, self._c, self._config, self._layout, self._number = graph, c, config, layout, number
        self._shapes = shapes
        self._inputs = {f"step.{n}": _input(s) for n, s in layout.inputs[number].items()}
        layer_states = {name for graph in layout.layers for layer in graph for name in layer.values()}
        self._states = {n: self.state(p) for n, p in layout.states.items() if n not in layer_states}
        self.units: dict[str, Unit] = {}

    def graph(self, drafted: bool, hidden: Hidden | None) -> TracedGraph:
        """drafted: whether there is a draft graph. hidden: what it reads of the main one."""
        graph, c, layout = self._graph, self._c, self._layout
        layer_types = graph.layer_types(c)
        around = self.stages(drafted, hidden)
        resolved: dict[str, TensorSpec] = {}
        for stage in dict.fromkeys(stage for before, _ in around.values() for stage in before):
            unit = self.trace(stage.name, self.weights(dict(stage.weights)), stage.run, stage.outputs)
            resolved |= zip(unit.outputs, output_specs(unit), strict=True)
            self._inputs |= {n: spec for n, spec in resolved.items() if n.startswith("step.")}
        embed = self.trace(
            "embed", self.weights(graph.embed_weights(c)), lambda v: _flat(graph.embed(c, _weights(v), self.context(v)))
        )
        carried = dict(zip(embed.outputs, output_specs(embed), strict=True))
        for layer_type in dict.fromkeys(layer_types):
            self.layer(layer_type, tuple(i for i, t in enumerate(layer_types) if t == layer_type), carried)
        behind: dict[int, list[str]] = {i: [] for i in range(len(layer_types))}
        counting = self.counting(behind) if graph.task == "generate" and self._config.counts_experts else None
        if hidden is not None and graph.task == "generate":
            drafting.check_width(hidden, carried["x"].shape[-1])
            for layer, keep in drafting.keep_hidden(hidden):
                behind[layer].append(keep.name)
                self.trace(keep.name, carried, keep.run, keep.outputs)
        counted = () if counting is None else (counting.output,)
        names = {"generate": ("logits",), "draft": ("drafted",), "pool": ("pooled",)}.get(graph.task, ())
        head = self.trace(
            "head",
            self.weights(graph.head_weights(c)) | carried,
            lambda v: _results(graph.head(c, _weights(v), v["x"], self.context(v)), graph, c, v, self._config),
            names,
        )
        pooled = output_specs(head)[0] if graph.task == "pool" else None
        made: tuple[OutputSpec, ...] = sampling.OUTPUTS if graph.task == "generate" else ()
        if pooled is not None:
            made = (OutputSpec("pooled", pooled.shape, pooled.dtype, host=True),)
        values = carried | resolved | dict(zip(head.outputs, output_specs(head), strict=True))
        caches = {} if self._config.tree is None else {n: self.state(layout.states[n]) for n, _ in self.caches()}
        for stage in dict.fromkeys(stage for _, after in around.values() for stage in after):
            unit = self.trace(stage.name, values | caches, stage.run, stage.outputs)
            values |= zip(unit.outputs, output_specs(unit), strict=True)
        programs = {}
        for name, (before, after) in around.items():
            first = () if counting is None else ("no_expert_tokens",)
            own: tuple[str, ...] = ("embed", "layers", "head")
            if graph.context is not None and name == "first":
                own = ("embed", "context")
            order = (*(s.name for s in before), *first, *own, *(s.name for s in after))
            made_here = {*names, *(n for s in after for n in s.outputs)}
            if name == "plain" and self._config.tensor_parallel_size > 1:
                made_here.discard("logits")  # no rank needs all logits: `compile.tasks.sample_from_shares`
            programs[name] = Program(
                order,
                {s.name: s.part for s in after if s.part},
                (*(o for o in made if o.name in made_here), *counted),
            )
        traced = TracedGraph(graph, self.units, programs, layer_types, behind)
        return traced if pooled is None else traced._replace(vector=_vector(graph, pooled))

    def stages(self, drafted: bool, hidden: Hidden | None) -> Mapping[str, tuple[tuple[Stage, ...], tuple[Stage, ...]]]:
        """By program, the stages before the graph's own units and after them. drafted: a draft graph follows."""
        task, config, layout = self._graph.task, self._config, self._layout
        if task == "draft":
            return drafting.programs(self._graph, self._c, config, hidden)
        if task != "generate":
            return {task: ((), ())}
        grown = isinstance(config.tree, DynamicTree)
        resolve = sampling.beginning(layout.versions, layout.inputs[self._number].values(), grown)
        before = (resolve, drafting.KEEP_IDS) if drafted else (resolve,)
        made = sampling.programs(config, layout.versions, self.caches())
        return {name: (before, after) for name, after in made.items()}

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

    def layer(self, layer_type: str, layers: tuple[int, ...], carried: dict[str, TensorSpec]) -> None:
        """One layer of a type, traced with the states and the block table of the first such layer: linking puts those
        of each layer in their place."""
        graph, c = self._graph, self._c
        own = self._layout.layers[self._number][layers[0]]
        states = {f"state.{n}": self.state(self._layout.states[name]) for n, name in own.items()}
        extra = self.weights(graph.layer_weights(c, layer_type)) | carried | states
        if self._layout.blocks.groups:
            group = self._layout.groups[self._number][layers[0]]
            extra["step.block_table"] = self._inputs[f"step.block_table.{group}"]

        def run(v: dict[str, Any]) -> tuple[Tensor]:
            return (graph.layer(c, layer_type, _weights(v), v["x"], self.context(v)),)

        self.trace(f"layer.{layer_type}", extra, run, layers=layers)
        if (context := graph.context) is not None:

            def keep(v: dict[str, Any]) -> tuple[()]:
                context(c, layer_type, _weights(v), self.context(v))
                return ()

            self.trace(f"context.{layer_type}", extra, keep, (), layers)

    def counting(self, behind: dict[int, list[str]]) -> ExpertCounter:
        """Units that count the tokens of experts: before all layers and after each."""
        types = self._graph.layer_types(self._c)
        units = {t: self.units[f"layer.{t}"] for t in types}
        made = expert_counts.count(len(types), list(units.values()), self._config)
        table, outputs = {expert_counts.TABLE: made.table}, (expert_counts.TABLE,)
        self.trace("no_expert_tokens", {}, made.begin, outputs)
        self.trace("count_expert_tokens", {**table, expert_counts.EXPERTS: made.chosen}, made.add, outputs)
        for layer_type, unit in units.items():
            self.units[f"layer.{layer_type}"] = expert_counts.with_experts(unit)
        for i, layer_type in enumerate(types):
            sparse = expert_counts.EXPERTS in self.units[f"layer.{layer_type}"].outputs
            behind[i].append("count_expert_tokens" if sparse else "skip_expert_tokens")
        if "skip_expert_tokens" in (unit for after in behind.values() for unit in after):
            self.trace("skip_expert_tokens", table, made.skip, outputs)
        return made

    def state(self, place: StatePlace) -> TensorSpec:
        return TensorSpec(place.dtype, (self._layout.entries.get(place.axis, _BLOCKS), *place.shape), place.stride)

    def weights(self, declared: Mapping[str, Weight]) -> dict[str, TensorSpec]:
        dtypes = {"model": self._config.dtype, "float32": "float32"}
        return {f"w.{n}": TensorSpec.contiguous(dtypes[w.dtype], *w.shape) for n, w in declared.items()}

    def context(self, v: Mapping[str, Any]) -> ForwardContext:
        inputs = {n.removeprefix("step."): t for n, t in v.items() if n.startswith("step.")}
        if "state_versions" not in inputs:  # nothing is rolled back: recurrent states have one version
            inputs["state_versions"] = torch.zeros_like(inputs["slots"])
        table = inputs.get("block_table")
        attn = AttentionMetadata(table, inputs["query_start_loc"], inputs["seq_lens"])  # type: ignore[arg-type]
        states = {n.removeprefix("state."): t for n, t in v.items() if n.startswith("state.")}
        shared = tuple(t for n, t in v.items() if n.startswith("shared."))
        return ForwardContext(SimpleNamespace(**inputs), SimpleNamespace(**states), attn, shared)

    def trace(
        self,
        name: str,
        extra: Mapping[str, TensorSpec],
        fn: Callable[[dict[str, Any]], tuple[Tensor, ...]],
        outputs: tuple[str, ...] = ("x",),
        layers: tuple[int, ...] = (),
    ) -> Unit:
        inputs = {**self._inputs, **self._states, **extra}
        unit = trace_unit(self._graph.prefix + name, inputs, fn, self._shapes, outputs, layers)
        self.units[name] = unit._replace(prefix=self._graph.prefix)
        return self.units[name]


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


def _input(spec: InputSpec) -> TensorSpec:
    return TensorSpec.contiguous(spec.dtype, *spec.shape)


def _vector(graph: Graph, pooled: TensorSpec) -> tuple[str, int]:
    """What there is a vector for each of, and its numbers. Raises GraphError for a head that gives none."""
    symbol, *rest = pooled.shape
    if symbol not in ("R", "T") or len(rest) != 1 or not isinstance(rest[0], int):
        raise GraphError(
            f"the head of {graph.name or 'the model'} gives {pooled}; the task pool takes [R, D] or [T, D]"
        )
    return str(symbol), rest[0]


def _flat(result: tuple[Tensor, tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return (result[0], *result[1])


def _results(made: Any, graph: Graph, c: Any, values: dict[str, Any], config: CompileConfig) -> tuple[Tensor, ...]:
    if graph.task == "draft":
        return (drafting.chosen(made, values, config, graph, c),)
    return () if made is None else (made,)


def _weights(values: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**{n[2:]: v for n, v in values.items() if n.startswith("w.")})
