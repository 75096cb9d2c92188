"""The layout of a model: where the states lie that its graphs, tasks and passes declare; inputs of its graphs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from graphllm.compile.tasks.of_model import tasks_of
from graphllm.compile.tasks.snapshots import may_export, with_snapshots
from graphllm.compile.tasks.task import Task
from graphllm.config import CompileConfig, ConfigError
from graphllm.ir.model import Model
from graphllm.program.snapshots import plan_snapshots
from graphllm.program.specs import InputSpec, StateSpec
from graphllm.program.states import BlockPlan, StatePlace, layer_places, own_place, plan_blocks, side_by_side
from graphllm.rewrite import PassReport, Unit


class Layout(NamedTuple):
    """What a model's graphs read and leave, planned before they are traced.

    tasks: of each graph.
    blocks: the pool of block states, over the layers of all graphs in their order.
    states: where each state lies, by its name in programs.
    entries: how many entries there are of each axis but "block"; "recurrent": of recurrent states, which have more than
        slots: `exports` of them are for snapshots, and the last one is scrap, too.
    layers: of each graph, the states of each layer by the layer's own names for them.
    inputs: of each graph, by name.
    versions: of recurrent states, one for each token of a verification step.
    slot_bytes, snapshot_bytes: see `Program`.
    groups: the cache group of each graph's layers; 0 for a layer without one.
    """

    tasks: list[Task]
    blocks: BlockPlan
    states: dict[str, StatePlace]
    entries: dict[str, int]
    layers: list[list[dict[str, str]]]
    inputs: list[dict[str, InputSpec]]
    versions: int
    slot_bytes: int
    groups: list[list[int]]
    snapshot_bytes: int = 0

    @property
    def exports(self) -> int:
        """Entries that steps may export recurrent states to."""
        return max(0, self.entries["recurrent"] - self.entries["slot"] - 1)


_EXPORTS = 4  # prompts of a step that leave a state inside of it


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
        InputSpec("exports", ("S",), neutral=-1, provider="exports"),
        InputSpec("state_versions", ("S",)),  # zeros, but where a verification step's first unit makes others
    ]
    for number, group in enumerate(groups):
        width = -(-config.max_model_len // group.block_size)
        specs.append(InputSpec(f"block_table.{number}", ("S", width), provider="block_table", ragged=True))
    return {s.name: s for s in specs}


def plan_layout(model: Model, c: Any, config: CompileConfig) -> Layout:
    """Plan the states that a family and its tasks declare, and the inputs of its graphs. c: the Config of one rank.
    Raises ConfigError for states that contradict each other and for settings that the model cannot serve."""
    model = with_snapshots(model, config)
    tasks = tasks_of(model, c, config)
    per_graph = [
        [tuple(_typed(s, config) for s in graph.states(c, layer_type)) for layer_type in graph.layer_types(c)]
        for graph in model.graphs
    ]
    layers = [states for graph in per_graph for states in graph]
    used = {s.dtype for graph in model.graphs for t in set(graph.layer_types(c)) for s in graph.states(c, t)}
    for setting, dtype, what in (
        ("kv_cache_dtype", "cache", "keys and values"), ("mamba_ssm_cache_dtype", "recurrent", "recurrent states")
    ):  # fmt: skip
        if (chosen := getattr(config, setting)) != "auto" and dtype not in used:
            raise ConfigError(f"{setting} is {chosen}: this model has no {what} that can be rounded; use auto")
    for task in tasks:
        task.check(layers)
    blocks, versions = plan_blocks(layers, config.block_size, config.max_model_len), config.longest_query
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
    own = [*model.states(c), *(s for task in tasks for s in task.states())]
    states |= {f"state.{s.name}": own_place(_typed(s, config), versions) for s in own}
    states, slot_bytes = side_by_side(states)
    snapshot_bytes = slot_bytes
    if config.snapshot_dtype == "int8":
        places, snapshot_bytes = plan_snapshots(states, slot_bytes)
        if not places:
            raise ConfigError("snapshot_dtype is int8: this model has no recurrent states to round; use auto")
        states |= places
    inputs = [
        base_inputs(config, blocks.groups)
        | {s.name: _with_provider(s) for s in graph.inputs(c)}
        | {s.name: s for s in task.inputs()}
        for graph, task in zip(model.graphs, tasks, strict=True)
    ]
    entries = {
        "slot": config.max_num_seqs + 1,
        "recurrent": config.max_num_seqs + 1 + (_EXPORTS + 1 if may_export(config) else 0),
        "token": max(b.limits(config.max_num_seqs)["T"] for b in config.buckets),
        "item": config.item_tokens + 1,
        "adapter": config.max_loras + 1,
    }
    return Layout(tasks, blocks, states, entries, names, inputs, versions, slot_bytes, groups, snapshot_bytes)


def with_added(layout: Layout, added: Iterable[tuple[Unit, PassReport]], config: CompileConfig) -> Layout:
    """The layout with the states and inputs that passes have added to units."""
    states, layers, inputs = dict(layout.states), [[*graph] for graph in layout.layers], [*layout.inputs]
    for unit, report in added:
        number = next(i for i, task in enumerate(layout.tasks) if task.graph.prefix == unit.prefix)
        inputs[number] = inputs[number] | {s.name: s for s in report.inputs}
        for state in report.states:
            assert state.retention != "last", f"{state.name}: recurrent states have their places before passes run"
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
    return state.typed(config.state_dtypes)
