"""Package an artifact: pieces, programs with their memory plans, the weight plan, the readable IR and the manifest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from graphllm.compile.codegen.jobs import Built, takes_torch
from graphllm.compile.cost import step_costs
from graphllm.compile.exports import all_export
from graphllm.compile.layout import Layout
from graphllm.compile.link import Linked
from graphllm.compile.trace import TracedGraph
from graphllm.config import Bucket, CompileConfig
from graphllm.ir.graph_form import to_text
from graphllm.program.linking import LinkedProgram, PieceCall, plan_memory
from graphllm.program.manifest import Cost, MemoryTable
from graphllm.program.program import BlockPool, DraftReach, GraphProgram, Program, ProgramGraph
from graphllm.program.schema import NEUTRAL, ExpertLayout
from graphllm.program.states import place_bytes
from graphllm.rewrite import PassReport, Unit
from graphllm.weights.adapters.adapted import AdaptedLinear, adapted_layer
from graphllm.weights.plan.expert_slots import ROUTING_TABLES
from graphllm.weights.plan.plan import WeightPlan


class Traced(NamedTuple):
    """The model after the passes over units.

    plan: the edited weight plan.
    reports: of every pass on every unit.
    texts: the readable IR as traced and after each pass, by file name.
    added: what passes have added to units.
    """

    plan: WeightPlan
    reports: list[dict[str, Any]]
    texts: dict[str, str]
    added: list[tuple[Unit, PassReport]]


class CompiledModel(NamedTuple):
    """A model with its pieces built, before it is written.

    graphs: as units, after the passes.
    layout: where states lie.
    linked: its programs as calls of pieces.
    built: code of each piece for each bucket.
    adapted: linear layers that have tables of adapters, with the weights they had before they were encoded.
    libraries: names of prebuilt libraries that pieces call.
    """

    graphs: list[TracedGraph]
    layout: Layout
    traced: Traced
    linked: Linked
    built: Mapping[tuple[str, Bucket], Built]
    adapted: list[AdaptedLinear]
    libraries: tuple[str, ...]
    config: CompileConfig


def piece_buckets(graphs: list[TracedGraph], linked: Linked) -> list[tuple[str, Bucket]]:
    """What is built: every distinct piece for every bucket of the graphs that use it."""
    return list(
        dict.fromkeys(
            (piece.id, bucket)
            for number, graph in enumerate(graphs)
            for piece in linked.pieces_of(number)
            for bucket in graph.task.buckets()
        )
    )


def values_read(graph: TracedGraph) -> set[str]:
    """The values that a graph's units read. An input that a unit only resolves is left out: if nothing reads the
    resolved form, the input decides nothing."""
    return {
        label
        for unit in graph.units.values()
        for node in unit.graph.find_nodes(op="placeholder")
        if (label := node.meta["label"]) not in unit.outputs
    }


def adapted_linears(added: Iterable[tuple[Unit, PassReport]], plan: WeightPlan) -> list[AdaptedLinear]:
    """The layers that have tables of adapters, with the weights they have in a plan in which nothing is encoded yet."""
    weights = [
        (unit, state.name.removesuffix(".lora_a").removeprefix(f"{unit.name}."))
        for unit, report in added
        for state in report.states
        if state.name.endswith(".lora_a")
    ]
    entries = [entry for unit, weight in weights for entry in unit.entries(weight)]
    return [found for entry in entries if (found := adapted_layer(plan, entry)) is not None]


def moving_experts(plan: WeightPlan, config: CompileConfig) -> ExpertLayout:
    """What is moved with an expert, by layer, and how many experts and slots there are."""
    layers: dict[int, list[str]] = {}
    for entry in plan:
        head, _, rest = entry.name.partition(".")
        if head == "layers" and entry.expert_axis is not None and not entry.tie:
            layers.setdefault(int(rest.partition(".")[0]), []).append(entry.name)
    slots = next(e.shape[0] for e in plan if e.name.endswith(ROUTING_TABLES[1]))
    return ExpertLayout(
        experts=slots - config.num_redundant_experts,
        slots=slots,
        ranks=config.tensor_parallel_size,
        layers=layers,
        bytes=max(sum(plan[n].nbytes // plan[n].shape[0] for n in names) for names in layers.values()),
    )


def write_program(folder: Path, model: CompiledModel) -> MemoryTable:
    """Write pieces, programs with their memory plans, and the weight plan; the memory that they take."""
    for (piece, bucket), b in model.built.items():
        (folder / "pieces" / f"{piece}-{bucket.name}.json").write_text(json.dumps(b.bundle, separators=(",", ":")))
        for name, blob in b.blobs.items():
            (folder / "pieces" / name).write_bytes(blob)
    layout, plan, config, blocks = model.layout, model.traced.plan, model.config, model.layout.blocks
    used = [
        {i for p in programs.values() for call in p.calls for i in call.inputs} for programs in model.linked.programs
    ]
    graphs = tuple(_program_graph(model, number, used[number]) for number in range(len(model.graphs)))
    states = {n: place for n, place in layout.states.items() if any(n in read for read in used)}
    Program(
        graphs=graphs,
        states=states,
        blocks=BlockPool(blocks.groups, blocks.tensors, blocks.block_bytes),
        entries=layout.entries,
        shareable=all(_is_shareable(traced, written) for traced, written in zip(model.graphs, graphs, strict=True)),
        vector=model.graphs[0].vector,
        drafts=next((reach for task in layout.tasks if (reach := task.reach()) is not None), DraftReach()),
        adapted=list(model.adapted),
        experts=moving_experts(plan, config) if config.enable_eplb else None,
        vocab=layout.tasks[0].c.V,
        torch=takes_torch(model.built.values(), folder / "pieces"),
        libraries=model.libraries,
        slot_bytes=layout.slot_bytes,
        snapshot_bytes=layout.snapshot_bytes,
        exports=layout.exports if all_export(model.linked, layout, model.built) else 0,
    ).write(folder)
    (folder / "weights.json").write_text(plan.to_json())
    arenas = {
        f"{bucket} {graph.graph.prefix}{name}": memory.arena_bytes
        for graph, written in zip(model.graphs, graphs, strict=True)
        for name, program in written.programs.items()
        for bucket, memory in program.memory.items()
    }
    single = [p for p in states.values() if p.axis != "block" and p.retention != "last"]
    recurrent = layout.versions * layout.slot_bytes
    return MemoryTable(
        weights=plan.total_bytes,
        arena=max(arenas.values()),
        arenas=arenas,
        zeroed=max(m.zeroed for g in graphs for p in g.programs.values() for m in p.memory.values()),
        state=sum(place_bytes(p, layout.entries[p.axis]) for p in single) + layout.entries["recurrent"] * recurrent,
        snapshot=layout.snapshot_bytes,
        block=blocks.bytes_per_block,
        token=sum(blocks.bytes_per_block // g.block_size for g in blocks.groups),
        blocks_of_sequence=sum(-(-config.max_model_len // g.block_size) for g in blocks.groups),
        unused_of_block=blocks.tensors * max(blocks.unused, default=0),
        state_of_sequence=sum(place_bytes(p, 1) for p in single if p.axis == "slot") + recurrent,
    )


def _program_graph(model: CompiledModel, number: int, used: set[str]) -> ProgramGraph:
    """A graph's programs. used: the values that its calls read."""
    graph, config, buckets, programs = model.graphs[number], model.config, model.graphs[number].task.buckets(), {}
    for name, program in model.linked.programs[number].items():
        plans = {}
        for bucket in buckets:
            calls = [PieceCall(model.built[c.piece, bucket].bundle, c.inputs, c.outputs) for c in program.calls]
            limits = bucket.limits(config.max_num_seqs, config.longest_query)
            plans[bucket.name] = plan_memory(LinkedProgram(calls, program.results, program.parts), limits)
        host = {o.name: o.shape[0] for o in graph.programs[name.removesuffix(NEUTRAL)].results if o.host}
        programs[name] = GraphProgram(program.calls, program.parts, program.results, host, plans)
    inputs = {n: s for n, s in model.layout.inputs[number].items() if f"step.{n}" in used}
    optional = tuple(model.linked.optional[number])
    return ProgramGraph(graph.graph.name, graph.graph.task, inputs, buckets, optional, programs)


def _is_shareable(graph: TracedGraph, written: ProgramGraph) -> bool:
    """Whether cached states of a prefix are valid whatever follows it. A vector of each token needs every token to be
    computed."""
    deciding = values_read(graph)
    return graph.vector[0] != "T" and all(s.shareable for n, s in written.inputs.items() if f"step.{n}" in deciding)


def pass_reports(model: CompiledModel) -> list[dict[str, Any]]:
    """What the manifest says of passes: on every unit, and on every piece that they changed."""
    of_pieces = (
        {**report, "unit": f"{model.linked.pieces[piece].label} {bucket.name}"}
        for (piece, bucket), built in model.built.items()
        for report in built.reports
    )
    return [*model.traced.reports, *of_pieces]


def kernels_of_pieces(model: CompiledModel) -> dict[str, dict[str, list[Any]]]:
    """By piece and bucket, the kernels that were chosen."""
    found: dict[str, dict[str, list[Any]]] = {}
    for piece in model.linked.pieces.values():
        built = {bucket.name: list(made.chosen) for (id, bucket), made in model.built.items() if id == piece.id}
        found[f"{piece.label} [{piece.id}]"] = built
    return found


def costs_of_steps(model: CompiledModel) -> dict[str, Cost]:
    """What a step must at least do, by bucket and program."""
    buckets = [graph.task.buckets() for graph in model.graphs]
    shapes = next(iter(model.graphs[0].units.values())).shapes
    return step_costs(model.graphs, model.linked, buckets, shapes, model.config.max_num_seqs)


def write_graphs(folder: Path, model: CompiledModel) -> None:
    """The readable IR: units after each stage, distinct pieces, and each piece as lowered for each bucket."""
    folder.mkdir(parents=True, exist_ok=True)
    traced, linked = model.traced, model.linked
    for name, text in traced.texts.items():
        (folder / name).write_text(text)
    (folder / "weights.txt").write_text(str(traced.plan))
    shapes = next(iter(model.graphs[0].units.values())).shapes
    for piece in linked.pieces.values():
        times = max(
            sum(call.piece == piece.id for call in p.calls) for programs in linked.programs for p in programs.values()
        )
        title = f"piece {piece.id}: {piece.label}, runs {times} times a step"
        (folder / f"piece.{piece.id}.txt").write_text(to_text(piece.graph, shapes, title))
    for (piece_id, bucket), b in model.built.items():
        if b.text:
            (folder / f"lowered.{piece_id}.{bucket.name}.txt").write_text(b.text)
