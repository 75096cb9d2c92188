"""The compile pipeline, as a table of contents: trace, passes by stage, link, build for each bucket, package.

After each stage the IR is verified and, with ``dump``, written as readable text.
"""

from __future__ import annotations

import functools
import json
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from graphllm.compile.building import begin_builds, finish_builds
from graphllm.compile.codegen.jobs import Built, takes_torch
from graphllm.compile.codegen.objects import Objects
from graphllm.compile.cost import step_costs
from graphllm.compile.described import described, unread_fields
from graphllm.compile.link import Linked, link
from graphllm.compile.passes import pipeline
from graphllm.compile.pieces import require_implementations
from graphllm.compile.row_order import require_row_orders
from graphllm.compile.split import check_rules, split_layers
from graphllm.compile.tasks import drafting
from graphllm.compile.tasks.drafting import joined
from graphllm.compile.trace import Layout, TracedGraph, plan_layout, trace_model, with_added
from graphllm.compile.tuning.workers import Workers, open_workers
from graphllm.config import Bucket, CompileConfig, ConfigError
from graphllm.config.fields import strings
from graphllm.host.machine import compiler_version
from graphllm.ir.graph import to_text, verify
from graphllm.ir.kernels import sources_in
from graphllm.ir.model import Model, derived_model
from graphllm.ir.op import op_of
from graphllm.ir.registry import load_models, load_ops, load_passes
from graphllm.program import artifact
from graphllm.program.linking import LinkedProgram, PieceCall, plan_memory
from graphllm.program.manifest import Manifest, MemoryTable
from graphllm.program.program import BlockPool, DraftReach, GraphProgram, Program, ProgramGraph
from graphllm.program.schema import NEUTRAL, ExpertLayout
from graphllm.program.states import place_bytes
from graphllm.rewrite import Pass, PassReport, Unit
from graphllm.weights.adapters.adapted import AdaptedLinear, adapted_layer
from graphllm.weights.checkpoint.checkpoint import DRAFT
from graphllm.weights.plan.cache_scales import with_cache_scales
from graphllm.weights.plan.expert_slots import ROUTING_TABLES
from graphllm.weights.plan.plan import WeightPlan, make_plan
from graphllm.weights.plan.schemes import Stored, as_quantized
from graphllm.weights.plan.shard import shard_plan, share_experts
from graphllm.weights.plan.table import table

if TYPE_CHECKING:
    from graphllm.compile.codegen.backends import Backend
    from graphllm.compile.tuning.tune import Tuner

Progress = Callable[[str, int, int], None]  # stage, done, total


class Traced(NamedTuple):
    """The model after the passes: the edited plan, the report of every pass on every unit, the readable IR as traced
    and after each pass, by file name, and what passes added to units."""

    plan: WeightPlan
    reports: list[dict[str, Any]]
    texts: dict[str, str]
    added: list[tuple[Unit, PassReport]]


def open_backend(config: CompileConfig, objects: Objects | None, turns: Path | None = None) -> Backend:
    """The backend a config asks for. Importing it takes a second where it is Inductor. objects: for C++, None in a
    process that only generates it. turns: locks of processes that use the GPU at the same time."""
    if config.backend == "eager":
        from graphllm.compile.codegen.backends import Eager

        return Eager()
    if config.target.device == "cpu":
        from graphllm.compile.codegen.backends import Cpu

        return Cpu(objects)
    from graphllm.compile.codegen.cuda import Cuda

    return Cuda(turns)


def find_model(model_config: Mapping[str, Any]) -> Model:
    """The family that serves a ``config.json``, with the draft graph of the one that is in its field "draft". Raises
    ConfigError with the list of known architectures."""
    if model_config.get(DRAFT) is None:
        return _family(model_config)
    return local_model(model_config, 1, False)[0]


def local_model(model_config: Mapping[str, Any], degree: int, experts_apart: bool) -> tuple[Model, Any]:
    """The same family for one of ``degree`` tensor-parallel ranks, and that rank's Config. A draft graph that cannot be
    divided is whole on every rank. experts_apart: see `Model.local`. Raises ConfigError."""
    model = _family(model_config)
    c = model.local(model.config(model_config), degree, experts_apart)
    if (drafts := model_config.get(DRAFT)) is None:
        return model, c
    drafter = _drafter(model_config, drafts)
    own = drafter.config(drafts)
    return joined(model, c, drafter, drafter.local(own, degree, experts_apart) if drafter.shardable else own), c


def _drafter(model_config: Mapping[str, Any], drafts: Mapping[str, Any]) -> Model:
    """The family of a draft model: the one of its field "method", or that its architecture names."""
    method, known = drafts.get("method"), load_models()
    if method in (None, "draft_model"):
        family = _family(drafts)
        if method is not None and family.method:
            raise ConfigError(f"the draft model is no language model: its method is {family.method}, not draft_model")
        return family
    found = {id(m): m for m in known.values() if m.method == method}.values()
    fitting = [m for m in found if not m.part_of or set(strings(model_config, "architectures")) & set(m.part_of)]
    named = [m for m in fitting if set(strings(drafts, "architectures")) & set(m.architectures)]
    if not fitting:
        there = sorted({"draft_model", *(m.method for m in known.values() if m.method)})
        parts = [name for m in found for name in m.part_of]
        told = f"is for {', '.join(parts)}" if parts else f"there is not; there are {', '.join(there)}"
        raise ConfigError(f"speculative_method is {method!r:.80}: that {told}")
    return (named or fitting)[0]


def _family(model_config: Mapping[str, Any]) -> Model:
    names, known = strings(model_config, "architectures"), load_models()
    if names and (model := known.get(names[0]) or derived_model(names[0])) is not None:
        return model
    if "auto_map" in model_config:
        raise ConfigError(
            f"config.json: auto_map says that {(names or [model_config.get('model_type')])[0]} is code of the "
            "repository's own, which never runs, with trust_remote_code neither; use a model of a known architecture, "
            "or write it as docs/adding-a-model.md shows"
        )
    kinds: dict[str, list[str]] = {"generating text": [], "giving vectors": [], "drafting": []}
    for name, model in sorted(known.items()):
        task = "giving vectors" if model.graphs[0].task == "pool" else "generating text"
        kinds["drafting" if model.method else task].append(name)
    listed = "; ".join(f"for {kind} {', '.join(of)}" for kind, of in kinds.items())
    inner = ", nor is it one of the multimodal models that run as text" if "text_config" in model_config else ""
    raise ConfigError(
        f"config.json architectures: {list(names) or 'missing'} (model_type {model_config.get('model_type')!r:.80}) is "
        f"not supported{inner}. Known: {listed}. docs/adding-a-model.md shows how to add one in a file of your own"
    )


def compile_model(
    model_config: Mapping[str, Any],
    tensors: str,
    config: CompileConfig,
    folder: Path,
    progress: Progress = lambda stage, done, total: None,
    tuned: Path | None = None,
    complete: Callable[[Path], None] | None = None,
    objects: Objects | None = None,
    workers: Workers | None = None,
    origin: Mapping[str, str | None] = {},
    stored: Stored | None = None,
) -> Path:
    """Compile a model into an artifact at ``folder``; see `artifact.key_factors` for the arguments. Returns the folder.

    tuned: folder that keeps what tuning found, for later compiles. complete: adds to the files of the artifact, which
    are all there but the manifest. objects: of C++; without them none is kept for later compiles. workers: processes to
    build in, started before; they end here. origin: the model's name, and the commit of its repository, for the
    manifest. stored: the checkpoint's tensors, which show what of a quantized one is encoded.

    Raises ConfigError for a model or setting that is not supported, BuildError when a compiler fails. No files are left
    unless the artifact is complete.
    """
    started = time.perf_counter()
    load_ops()
    load_passes()
    fields = described(model_config, config.max_model_len)
    model = find_model(fields)
    c = model.config(fields)
    seconds: dict[str, float] = {}

    def timed(stage: str) -> None:
        seconds[stage] = round(time.perf_counter() - started - sum(seconds.values()), 3)

    building = artifact.begin(folder)
    try:
        pieces = _made(building / "pieces")
        progress("trace", 0, 1)
        degree = config.tensor_parallel_size
        plan = as_quantized(make_plan(model, c, config.dtype), model_config, stored)
        if config.kv_cache_dtype == "fp8":
            plan = with_cache_scales(plan, stored)
        plan = shard_plan(plan, degree, config.enable_expert_parallel, config.num_redundant_experts)
        if config.data_parallel_experts > 1:
            plan = share_experts(plan, config.data_parallel_experts)
        model, c = local_model(fields, degree, config.enable_expert_parallel)
        layout = plan_layout(model, c, config)
        check_rules(plan, config)
        graphs = [split_layers(graph, plan, config) for graph in trace_model(model, c, config, layout)]
        timed("trace")
        units = [unit for graph in graphs for unit in graph.units.values()]
        traced = run_passes(units, plan, config, pipeline().units)
        adapted = adapted_linears(traced.added, plan)
        layout = with_added(layout, graphs, traced.added, config)
        timed("passes")
        linked = link(graphs, layout, config)
        jobs = piece_buckets(graphs, linked, c, config)
        timed("link")
        if config.backend == "inductor":
            require_implementations(((linked.pieces[id].json, bucket) for id, bucket in jobs), config)
        if config.deterministic:
            require_row_orders(((linked.pieces[id].json, bucket) for id, bucket in jobs), config)
        with objects or Objects() as objects, workers or open_workers(config) as workers:
            if config.target.device == "cpu" and config.backend == "inductor":
                objects.expect(sources_beside(linked))
            backend = open_backend(config, objects)
            timed("import backend")
            tuner = open_tuner(config, workers, functools.partial(progress, "tune"), tuned)
            begun = begin_builds(linked, jobs, config, backend, tuner, workers)
            timed("tune")
            built = finish_builds(jobs, begun, functools.partial(progress, "build"))
            if workers:
                workers.end()
            timed("build")
            backend.assemble(built.values(), pieces)
            timed("assemble")
            memory = write_program(building, graphs, layout, linked, built, traced, adapted, c, config)
            write_graphs(building / "graph", traced, units, linked, built)
            if tuner:
                taken = {key: m.microseconds for key, m in tuner.measured.items()}
                (building / "graph" / "tuning.json").write_text(json.dumps(taken, indent=1))
            if config.dump:
                write_graphs(config.dump, traced, units, linked, built)
            timed("package")
        if complete is not None:
            complete(building)
            timed("complete")
    except BaseException:
        shutil.rmtree(building)
        raise
    manifest = Manifest(
        factors=artifact.key_factors(model_config, tensors, config),
        origin=dict(origin),
        unread=unread_fields(fields),
        passes=[
            *traced.reports,
            *(
                {**report, "unit": f"{linked.pieces[piece].label} {bucket.name}"}
                for (piece, bucket), b in built.items()
                for report in b.reports
            ),
        ],
        pieces={
            f"{piece.label} [{piece.id}]": {b.name: list(built[piece.id, b].chosen) for id, b in jobs if id == piece.id}
            for piece in linked.pieces.values()
        },
        weights=table(traced.plan),
        memory=memory,
        cost=step_costs(
            graphs, linked, [graph_buckets(graph, c, config) for graph in graphs], units[0].shapes, config.max_num_seqs
        ),
        seconds=seconds,
        tuning={**tuner.counts, "seconds": round(tuner.seconds, 3)} if tuner else {},
        compilers=objects.seconds,
        made_with={"g++": compiler_version(), "machine": config.target.name},
    )
    return artifact.write(folder, building, manifest)


def run_passes(units: list[Unit], plan: WeightPlan, config: CompileConfig, passes: Sequence[Pass]) -> Traced:
    """Every pass over every unit, in order; the IR is verified and printed after each."""
    reports, texts = [], {}
    added: list[tuple[Unit, PassReport]] = []

    def show(unit: Unit, number: int, stage: str) -> None:
        texts[f"{number:02}-{stage}.{unit.name}.txt"] = to_text(
            unit.graph, unit.shapes, f"unit {unit.name} after {stage}"
        )

    for unit in units:
        verify(unit.graph, f"{unit.name} after trace")
        show(unit, 0, "trace")
    for number, p in enumerate(passes, 1):
        for unit in units:
            report, record = p.apply(unit, plan, config)
            plan = report.plan or plan
            if report.states or report.inputs:
                added.append((unit, report))
            show(unit, number, p.name)
            reports.append(record)
    return Traced(plan, reports, texts, added)


def open_tuner(
    config: CompileConfig, workers: Workers | None, progress: Callable[[int, int], None], folder: Path | None
) -> Tuner | None:
    """The tuner, which finds launch constants; None where kernels are not tuned."""
    if config.target.device == "cpu" or config.backend == "eager" or not config.tune:
        return None
    from graphllm.compile.tuning.tune import Tuner

    return Tuner(config, workers, progress, folder)


def sources_beside(linked: Linked) -> list[Path]:
    """The C++ kernels in the folders of the model's ops. Most will be called; lowering a piece shows which."""
    ops = (op_of(node.target) for piece in linked.pieces.values() for node in piece.graph.nodes)
    return sources_in({op.folder for op in ops if op is not None})


def graph_buckets(graph: TracedGraph, c: Any, config: CompileConfig) -> tuple[Bucket, ...]:
    """The sizes that a graph is compiled for."""
    if graph.graph.task == "draft":
        return drafting.buckets(graph.graph, c, config)
    return graph.graph.buckets(c) or config.buckets


def piece_buckets(graphs: list[TracedGraph], linked: Linked, c: Any, config: CompileConfig) -> list[tuple[str, Bucket]]:
    """What is built: every distinct piece for every bucket of the graphs that use it."""
    return list(
        dict.fromkeys(
            (piece.id, bucket)
            for number, graph in enumerate(graphs)
            for piece in linked.pieces_of(number)
            for bucket in graph_buckets(graph, c, config)
        )
    )


def draft_reach(graphs: list[TracedGraph], c: Any, config: CompileConfig) -> DraftReach:
    """What the host must know of the draft graph."""
    for graph in (g.graph for g in graphs if g.graph.task == "draft"):
        reach = drafting.lookahead(graph, c, config)
        block = 0 if graph.context is None else reach
        one_more = drafting.one_row_more(graph, c)
        return DraftReach(
            lookahead=reach,
            next_seen=reach > 0 and not one_more and not block,
            one_row_more=one_more,
            at_once=graph.drafts_at_once(c),
            by_levels=drafting.by_levels(graph, c, config),
            block=block,
        )
    return DraftReach()


def values_read(graph: TracedGraph) -> set[str]:
    """The values that a graph's units read, but for those that one only resolves: where nothing reads the resolved
    form, the input decides nothing."""
    return {
        label
        for unit in graph.units.values()
        for node in unit.graph.find_nodes(op="placeholder")
        if (label := node.meta["label"]) not in unit.outputs
    }


def adapted_linears(added: Iterable[tuple[Unit, PassReport]], plan: WeightPlan) -> list[AdaptedLinear]:
    """The layers that have tables of adapters, with what they are made of by a plan in which nothing is encoded yet."""
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


def write_program(
    folder: Path,
    graphs: list[TracedGraph],
    layout: Layout,
    linked: Linked,
    built: Mapping[tuple[str, Bucket], Built],
    traced: Traced,
    adapted: list[AdaptedLinear],
    c: Any,
    config: CompileConfig,
) -> MemoryTable:
    """Write pieces, programs with their memory plans, and the weight plan; returns what they take."""
    for (piece, bucket), b in built.items():
        (folder / "pieces" / f"{piece}-{bucket.name}.json").write_text(json.dumps(b.bundle, separators=(",", ":")))
        for name, blob in b.blobs.items():
            (folder / "pieces" / name).write_bytes(blob)
    read: set[str] = set()
    arenas: dict[str, int] = {}
    written: list[ProgramGraph] = []
    zeroed, shareable = 0, True
    for number, graph in enumerate(graphs):
        buckets = graph_buckets(graph, c, config)
        programs = {}
        for name, program in linked.programs[number].items():
            plans = {}
            for bucket in buckets:
                calls = [PieceCall(built[c.piece, bucket].bundle, c.inputs, c.outputs) for c in program.calls]
                limits = bucket.limits(config.max_num_seqs, config.longest_query)
                plan = plan_memory(LinkedProgram(calls, program.results, program.parts), limits)
                plans[bucket.name] = plan
                arenas[f"{bucket.name} {graph.graph.prefix}{name}"] = plan.arena_bytes
                zeroed = max(zeroed, plan.zeroed)
            host = {o.name: o.shape[0] for o in graph.programs[name.removesuffix(NEUTRAL)].results if o.host}
            programs[name] = GraphProgram(program.calls, program.parts, program.results, host, plans)
        used = {i for program in linked.programs[number].values() for call in program.calls for i in call.inputs}
        read |= used
        inputs = {n: s for n, s in layout.inputs[number].items() if f"step.{n}" in used}
        deciding = values_read(graph)
        shareable &= all(s.shareable for n, s in inputs.items() if f"step.{n}" in deciding)
        shareable &= graph.vector[0] != "T"  # of a beginning that is not computed there are no vectors
        written.append(
            ProgramGraph(graph.graph.name, graph.graph.task, inputs, buckets, tuple(linked.optional[number]), programs)
        )
    states = {n: place for n, place in layout.states.items() if n in read}
    blocks = layout.blocks
    Program(
        graphs=tuple(written),
        states=states,
        blocks=BlockPool(blocks.groups, blocks.tensors, blocks.block_bytes),
        entries=layout.entries,
        shareable=shareable,
        vector=graphs[0].vector,
        drafts=draft_reach(graphs, c, config),
        adapted=list(adapted),
        experts=moving_experts(traced.plan, config) if config.enable_eplb else None,
        vocab=c.V,
        torch=takes_torch(built.values(), folder / "pieces"),
    ).write(folder)
    (folder / "weights.json").write_text(traced.plan.to_json())
    return MemoryTable(
        weights=traced.plan.total_bytes,
        arena=max(arenas.values()),
        arenas=arenas,
        zeroed=zeroed,
        state=sum(place_bytes(p, layout.entries[p.axis]) for p in states.values() if p.axis != "block"),
        snapshot=sum(place_bytes(p, 1) // p.shape[0] for p in states.values() if p.retention == "last"),
        block=blocks.bytes_per_block,
        token=sum(blocks.bytes_per_block // g.block_size for g in blocks.groups),
        blocks_of_sequence=sum(-(-config.max_model_len // g.block_size) for g in blocks.groups),
        unused_of_block=blocks.tensors * max(blocks.unused, default=0),
    )


def write_graphs(
    folder: Path, traced: Traced, units: list[Unit], linked: Linked, built: Mapping[tuple[str, Bucket], Built]
) -> None:
    """The readable IR: units after each stage, distinct pieces, and each piece as lowered for each bucket."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in traced.texts.items():
        (folder / name).write_text(text)
    (folder / "weights.txt").write_text(str(traced.plan))
    shapes = units[0].shapes
    for piece in linked.pieces.values():
        times = max(
            sum(call.piece == piece.id for call in p.calls) for programs in linked.programs for p in programs.values()
        )
        title = f"piece {piece.id}: {piece.label}, runs {times} times a step"
        (folder / f"piece.{piece.id}.txt").write_text(to_text(piece.graph, shapes, title))
    for (piece_id, bucket), b in built.items():
        if b.text:
            (folder / f"lowered.{piece_id}.{bucket.name}.txt").write_text(b.text)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
