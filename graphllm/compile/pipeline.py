"""The compile pipeline, as a table of contents: trace, passes by stage, link, build for each bucket, package.

After each stage the IR is verified and, with ``dump``, written as readable text.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import math
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from graphllm import artifact
from graphllm.compile.link import Linked, link
from graphllm.compile.objects import Objects
from graphllm.compile.passes import Stage, Unit, ordered_passes
from graphllm.compile.trace import kv_spec, state_specs, step_specs, trace_model
from graphllm.config import Bucket, CompileConfig, ConfigError
from graphllm.ir.graph import to_text, verify
from graphllm.ir.kernels import sources_in
from graphllm.ir.model import Model
from graphllm.ir.op import op_of
from graphllm.ir.registry import load_models, load_ops, load_passes
from graphllm.machine import compiler_version
from graphllm.runtime.program import RESULTS, Call, LinkedProgram
from graphllm.weights.plan import WeightPlan, make_plan
from graphllm.weights.shard import shard_plan

if TYPE_CHECKING:
    from graphllm.compile.backends import Backend, Built
    from graphllm.compile.lower import Choice
    from graphllm.compile.tune import Measured

Progress = Callable[[str, int, int], None]  # stage, done, total
_MOST_WORKERS = 16  # each holds half a gigabyte of the GPU


class Traced(NamedTuple):
    """The model after the passes: units, the edited plan, the report of every pass on every unit, and the readable IR
    as traced and after each pass, by file name."""

    units: list[Unit]
    plan: WeightPlan
    reports: list[dict[str, Any]]
    texts: dict[str, str]


def open_backend(config: CompileConfig, objects: Objects) -> Backend:
    """The backend a config asks for. Importing it takes a second where it is Inductor. objects: for C++."""
    if config.backend == "eager":
        from graphllm.compile.backends import Eager

        return Eager()
    if config.target.device == "cpu":
        from graphllm.compile.backends import Cpu

        return Cpu(objects)
    from graphllm.compile.cuda import Cuda

    return Cuda()


def find_model(model_config: Mapping[str, Any]) -> Model:
    """The family that serves a ``config.json``. Raises ConfigError with the list of known architectures."""
    names = model_config.get("architectures") or []
    known = load_models()
    for name in names:
        if name in known:
            return known[name]
    raise ConfigError(
        f"config.json architectures: {names or 'missing'} is not supported. Known: {', '.join(sorted(known))}. "
        "docs/adding-a-model.md shows how to add one in a file of your own"
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
) -> Path:
    """Compile a model into an artifact at ``folder``; see `artifact.key_factors` for the arguments. Returns the folder.

    tuned: folder that keeps what tuning found, for later compiles. complete: adds to the files of the artifact, which
    are all there but the manifest. objects: of C++; without them none is kept for later compiles.

    Raises ConfigError for a model or setting that is not supported, BuildError when a compiler fails. Nothing is left
    behind unless the artifact is complete.
    """
    started = time.perf_counter()
    load_ops()
    load_passes()
    model = find_model(model_config)
    c = model.config(model_config)
    seconds: dict[str, float] = {}

    def timed(stage: str) -> None:
        seconds[stage] = round(time.perf_counter() - started - sum(seconds.values()), 3)

    building = artifact.begin(folder)
    try:
        pieces = _made(building / "pieces")
        progress("trace", 0, 1)
        degree = config.parallel.tensor_parallel_size
        plan = shard_plan(make_plan(model, c, config.dtype), degree)
        c = model.local(c, degree)
        units = trace_model(model, c, config)
        timed("trace")
        traced = run_passes(units, plan, config)
        timed("passes")
        linked = link(traced.units, model.kinds(c), config.max_model_len)
        timed("link")
        with objects or Objects() as objects:
            if config.target.device == "cpu" and config.backend == "inductor":
                objects.expect(sources_beside(linked))
            backend = open_backend(config, objects)
            timed("import backend")
            with open_workers(config, len(linked.pieces) * len(config.buckets)) as workers:
                measured: Mapping[str, Measured] = {}
                if config.target.device == "cuda" and config.backend == "inductor" and config.tune:
                    from graphllm.compile.tune import tune

                    texts = [p.json for p in linked.pieces.values()]
                    measured = tune(texts, config, workers, functools.partial(progress, "tune"), tuned)
                choices = {key: m.choice for key, m in measured.items()}
                timed("tune")
                built = build_pieces(linked, config, backend, choices, workers, progress)
            timed("build")
            backend.assemble(built.values(), pieces)
            timed("assemble")
        memory = write_program(building, linked, built, traced, c, config)
        write_graphs(building / "graph", traced, linked, built)
        if measured:
            taken = {key: m.microseconds for key, m in measured.items()}
            (building / "graph" / "tuning.json").write_text(json.dumps(taken, indent=1))
        if config.dump:
            write_graphs(config.dump, traced, linked, built)
        timed("package")
        if complete is not None:
            complete(building)
            timed("complete")
    except BaseException:
        shutil.rmtree(building)
        raise
    manifest = {
        "factors": artifact.key_factors(model_config, tensors, config),
        "passes": [
            *traced.reports,
            *(
                {**report, "unit": f"{linked.pieces[piece].label} {bucket.name}"}
                for (piece, bucket), b in built.items()
                for report in b.reports
            ),
        ],
        "pieces": {
            f"{piece.label} [{piece.id}]": {b.name: list(built[piece.id, b].chosen) for b in config.buckets}
            for piece in linked.pieces.values()
        },
        "memory": memory,
        "groups": len(linked.layout.windows),
        "seconds": seconds,
        "compilers": objects.seconds,
        "made_with": {"g++": compiler_version(), "machine": config.target.name},
    }
    return artifact.write(folder, building, manifest)


def run_passes(units: list[Unit], plan: WeightPlan, config: CompileConfig) -> Traced:
    """Every registered pass over every unit, in order; the IR is verified and printed after each."""
    reports, texts = [], {}

    def show(unit: Unit, number: int, stage: str) -> None:
        texts[f"{number:02}-{stage}.{unit.name}.txt"] = to_text(
            unit.graph, unit.shapes, f"unit {unit.name} after {stage}"
        )

    for unit in units:
        verify(unit.graph, f"{unit.name} after trace")
        show(unit, 0, "trace")
    passes = [p for p in ordered_passes() if p.stage is not Stage.SPECIALIZE]
    for number, p in enumerate(passes, 1):
        for unit in units:
            report, record = p.apply(unit, plan, config)
            plan = report.plan or plan
            show(unit, number, p.name)
            reports.append(record)
    return Traced(units, plan, reports, texts)


@contextlib.contextmanager
def open_workers(config: CompileConfig, jobs: int) -> Iterator[concurrent.futures.Executor | None]:
    """Processes to build for a GPU in. None where one is enough: C++ is only generated per piece, and compiled in
    parallel by `Backend.assemble`."""
    if config.target.device == "cpu" or config.jobs == 1 or jobs == 1:
        yield None
        return
    workers = config.jobs or min(jobs, _MOST_WORKERS, len(os.sched_getaffinity(0)))
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn, initializer=_begin_worker) as pool:
        yield pool


def _begin_worker() -> None:
    """Know the ops and passes, and drop what Inductor prints; failures come back as exceptions."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    load_ops()
    load_passes()


def sources_beside(linked: Linked) -> list[Path]:
    """The C++ kernels that lie beside the model's ops. Most will be called; which, is known when pieces are lowered."""
    ops = (op_of(node.target) for piece in linked.pieces.values() for node in piece.graph.nodes)
    return sources_in({op.folder for op in ops if op is not None})


def build_pieces(
    linked: Linked,
    config: CompileConfig,
    backend: Backend,
    choices: Mapping[str, Choice],
    workers: concurrent.futures.Executor | None,
    progress: Progress,
) -> dict[tuple[str, Bucket], Built]:
    """Every distinct piece for every bucket; first those that are one op, whose kernels compile beside the others."""
    wanted = [(piece.id, bucket) for piece in linked.pieces.values() for bucket in config.buckets]
    jobs = sorted(wanted, key=lambda job: not linked.pieces[job[0]].boundary)
    done: dict[tuple[str, Bucket], Built] = {}
    if workers is None:
        for i, (piece, bucket) in enumerate(jobs):
            progress("build", i, len(jobs))
            done[piece, bucket] = backend.build(linked.pieces[piece].json, bucket, config, choices)
        return {job: done[job] for job in wanted}
    futures = {
        workers.submit(backend.build, linked.pieces[piece].json, bucket, config, choices): (piece, bucket)
        for piece, bucket in jobs
    }
    for i, future in enumerate(concurrent.futures.as_completed(futures)):
        progress("build", i, len(jobs))
        done[futures[future]] = future.result()
    return {job: done[job] for job in wanted}


def write_program(
    folder: Path,
    linked: Linked,
    built: Mapping[tuple[str, Bucket], Built],
    traced: Traced,
    c: Any,
    config: CompileConfig,
) -> dict[str, Any]:
    """Write pieces, program and weight plan; returns the memory table, in bytes."""
    for (piece, bucket), b in built.items():
        (folder / "pieces" / f"{piece}-{bucket.name}.json").write_text(json.dumps(b.bundle, separators=(",", ":")))
        for name, blob in b.blobs.items():
            (folder / "pieces" / name).write_bytes(blob)
    layout, kv = linked.layout, kv_spec(c, config, 1)
    step, state = step_specs(config, c.V, len(layout.windows)), state_specs(config, c.V)
    read = {i for program in linked.programs.values() for call in program.calls for i in call.inputs}
    description = {
        "programs": {
            name: {"calls": [[call.piece, list(call.inputs), list(call.outputs)] for call in program.calls],
                   "parts": program.parts}
            for name, program in linked.programs.items()
        },
        "step": {n: [s.dtype, list(s.shape), list(s.stride)] for n, s in step.items()},
        "state": {n: [s.dtype, list(s.shape)] for n, s in state.items()},
        "kv": {"tensors": layout.tensors, "dtype": kv.dtype, "page": list(kv.shape[1:]), "windows": layout.windows,
               "depends on length": "step.context_len" in read},
        "vocab": c.V,
    }  # fmt: skip
    (folder / "program.json").write_text(json.dumps(description, indent=1))
    (folder / "weights.json").write_text(traced.plan.to_json())
    arenas, zeroed = {}, 0
    for bucket in config.buckets:
        limits = bucket.limits(config.max_num_seqs)
        for name, program in linked.programs.items():
            calls = [Call(built[c.piece, bucket].bundle, c.inputs, c.outputs) for c in program.calls]
            done = LinkedProgram(calls, RESULTS, limits, program.parts)
            arenas[f"{bucket.name} {name}"] = done.arena_bytes
            zeroed = max(zeroed, done.zeroed)
    item = {"bfloat16": 2, "float16": 2, "float32": 4}[kv.dtype]
    page = layout.tensors * math.prod(int(d) for d in kv.shape[1:]) * item
    return {
        "weights": traced.plan.total_bytes,
        "arena": max(arenas.values()),
        "arena by bucket": arenas,
        "zeroed": zeroed,
        "state": sum(math.prod(int(d) for d in s.shape) * 4 for s in state.values()),
        "kv page": page,
        "kv bytes per token": page // config.block_size,
    }


def write_graphs(folder: Path, traced: Traced, linked: Linked, built: Mapping[tuple[str, Bucket], Built]) -> None:
    """The readable IR: units after each stage, distinct pieces, and each piece as lowered for each bucket."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in traced.texts.items():
        (folder / name).write_text(text)
    (folder / "weights.txt").write_text(str(traced.plan))
    shapes = traced.units[0].shapes
    for piece in linked.pieces.values():
        times = max(sum(call.piece == piece.id for call in p.calls) for p in linked.programs.values())
        title = f"piece {piece.id}: {piece.label}, runs {times} times a step"
        (folder / f"piece.{piece.id}.txt").write_text(to_text(piece.graph, shapes, title))
    for (piece_id, bucket), b in built.items():
        if b.text:
            (folder / f"lowered.{piece_id}.{bucket.name}.txt").write_text(b.text)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
