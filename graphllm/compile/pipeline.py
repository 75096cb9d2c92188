"""The compile pipeline, as a table of contents: plan, trace, passes by stage, link, build for each bucket, package.

`graphllm.compile.passes.PIPELINE` lists every rewrite. After each pass over units the IR is verified and, with
``dump``, written as readable text.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from graphllm.compile.building import NO_TOOLS, Progress, StageClock, Tools, build_pieces
from graphllm.compile.described import described, unread_fields
from graphllm.compile.families import find_model, local_model
from graphllm.compile.layout import plan_layout, with_added
from graphllm.compile.link import link
from graphllm.compile.package import (
    CompiledModel,
    Traced,
    adapted_linears,
    costs_of_steps,
    kernels_of_pieces,
    pass_reports,
    piece_buckets,
    write_graphs,
    write_program,
)
from graphllm.compile.passes import pipeline
from graphllm.compile.rewrites.contracts import GraphPass, PlanSource
from graphllm.compile.trace import TracedGraph, trace_model
from graphllm.config import CompileConfig
from graphllm.host.machine import compiler_version
from graphllm.ir.graph import verify
from graphllm.ir.graph_form import to_text
from graphllm.ir.registry import load_ops, load_passes
from graphllm.program import artifact
from graphllm.program.manifest import Manifest
from graphllm.rewrite import Pass, PassReport, Unit
from graphllm.weights.plan.plan import WeightPlan, make_plan
from graphllm.weights.plan.schemes import Stored
from graphllm.weights.plan.table import table


def compile_model(
    model_config: Mapping[str, Any],
    tensors: str,
    config: CompileConfig,
    folder: Path,
    progress: Progress = lambda stage, done, total: None,
    tools: Tools = NO_TOOLS,
    complete: Callable[[Path], None] | None = None,
    origin: Mapping[str, str | None] = {},
    stored: Stored | None = None,
) -> Path:
    """Compile a model into an artifact at ``folder``; see `artifact.key_factors` for the arguments. Returns the folder.

    complete: adds to the files of the artifact, which are all there but the manifest.
    origin: the model's name, and the commit of its repository, for the manifest.
    stored: the checkpoint's tensors, which show what of a quantized one is encoded.

    Raises ConfigError for a model or setting that is not supported, BuildError when a compiler fails. Nothing is left
    in the folder unless the artifact is complete.
    """
    clock = StageClock()
    load_ops()
    load_passes()
    fields, listed = described(model_config, config.max_model_len), pipeline()
    whole = find_model(fields)
    with _removed_if_it_fails(artifact.begin(folder)) as building:
        progress("trace", 0, 1)
        c = whole.config(fields)
        plan, source = make_plan(whole, c, config.dtype), PlanSource(model_config, stored, config)
        for plan_pass in listed.plan:
            plan = plan_pass(plan, source)
        layout = plan_layout(*local_model(fields, config.tensor_parallel_size, config.enable_expert_parallel), config)
        graphs = [rewritten(graph, plan, config, listed.graphs) for graph in trace_model(layout)]
        clock("trace")
        traced = run_passes(units_of(graphs), plan, config, listed.units)
        layout = with_added(layout, traced.added, config)
        clock("passes")
        linked = link(graphs, layout, config, listed.linked)
        jobs = piece_buckets(graphs, linked)
        clock("link")
        for check in listed.checks:
            check(((linked.pieces[id].json, bucket) for id, bucket in jobs), config, listed.pieces)
        built, tuner, objects, libraries = build_pieces(linked, jobs, config, building, tools, progress, clock)
        adapted = adapted_linears(traced.added, plan)
        model = CompiledModel(graphs, layout, traced, linked, built, adapted, libraries, config)
        memory = write_program(building, model)
        write_graphs(building / "graph", model)
        if tuner:
            taken = {key: m.microseconds for key, m in tuner.measured.items()}
            (building / "graph" / "tuning.json").write_text(json.dumps(taken, indent=1))
        if config.dump:
            write_graphs(config.dump, model)
        clock("package")
        if complete is not None:
            complete(building)
            clock("complete")
    manifest = Manifest(
        factors=artifact.key_factors(model_config, tensors, config),
        origin=dict(origin),
        implementation=whole.implementation(c),
        unread=unread_fields(fields),
        passes=pass_reports(model),
        pieces=kernels_of_pieces(model),
        weights=table(traced.plan),
        memory=memory,
        cost=costs_of_steps(model),
        seconds=clock.seconds,
        tuning={**tuner.counts, "seconds": round(tuner.seconds, 3)} if tuner else {},
        compilers=objects.seconds,
        made_with={"g++": compiler_version(), "machine": config.target.name},
    )
    return artifact.write(folder, building, manifest)


def rewritten(graph: TracedGraph, plan: WeightPlan, config: CompileConfig, passes: Sequence[GraphPass]) -> TracedGraph:
    """The graph after all passes over graphs."""
    for graph_pass in passes:
        graph = graph_pass(graph, plan, config)
    return graph


def units_of(graphs: Iterable[TracedGraph]) -> list[Unit]:
    """The units of all graphs."""
    return [unit for graph in graphs for unit in graph.units.values()]


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


@contextlib.contextmanager
def _removed_if_it_fails(folder: Path) -> Iterator[Path]:
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder)
        raise
