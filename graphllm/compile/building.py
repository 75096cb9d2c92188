"""BUILD: every distinct piece for every bucket, each as soon as the sites in it are tuned.

Build processes first find and compile the candidates of a choice, then pieces without a choice. In the meantime this
process times finished candidates.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from graphllm.compile.codegen.objects import Objects
from graphllm.compile.link import Linked
from graphllm.compile.tuning.workers import Workers, open_workers
from graphllm.config import Bucket, CompileConfig
from graphllm.ir.kernels import sources_in
from graphllm.ir.op import op_of

if TYPE_CHECKING:
    from graphllm.compile.codegen.backends import Backend
    from graphllm.compile.codegen.jobs import Built
    from graphllm.compile.tuning.tune import Tuner

Progress = Callable[[str, int, int], None]  # stage, done, total
Job = tuple[str, Bucket]  # a piece's id


class Tools(NamedTuple):
    """What pieces are built with.

    objects: compiled C++ objects that are kept for later compiles; None keeps none.
    workers: processes to build in, started before; they have nothing to do after the build, and the caller closes them.
    tuned: folder that keeps what tuning found, for later compiles.
    """

    objects: Objects | None = None
    workers: Workers | None = None
    tuned: Path | None = None


NO_TOOLS = Tools()


class Outcome(NamedTuple):
    """What was built.

    built: code of each piece for each bucket.
    tuner, objects: what found constants and compiled C++, for the manifest.
    libraries: names of prebuilt libraries that the pieces call.
    """

    built: Mapping[tuple[str, Bucket], Built]
    tuner: Tuner | None
    objects: Objects
    libraries: tuple[str, ...]


class StageClock:
    """seconds: of each stage so far."""

    def __init__(self) -> None:
        self._started, self.seconds = time.perf_counter(), dict[str, float]()

    def __call__(self, stage: str) -> None:
        """A stage has ended."""
        self.seconds[stage] = round(time.perf_counter() - self._started - sum(self.seconds.values()), 3)


def build_pieces(
    linked: Linked,
    jobs: Sequence[tuple[str, Bucket]],
    config: CompileConfig,
    folder: Path,
    tools: Tools,
    progress: Progress,
    clock: StageClock,
) -> Outcome:
    """Tune and build every piece for its buckets, and write the machine code into the artifact's folder."""
    pieces = folder / "pieces"
    pieces.mkdir()
    own = nullcontext(tools.workers) if tools.workers else open_workers(config)  # those given are the caller's to end
    with tools.objects or Objects() as objects, own as workers:
        if config.target.device == "cpu" and config.backend == "inductor":
            objects.expect(sources_of(linked))
        backend = open_backend(config, objects)
        clock("import backend")
        tuner = open_tuner(config, workers, functools.partial(progress, "tune"), tools.tuned)
        begun = begin_builds(linked, jobs, config, backend, tuner, workers)
        clock("tune")
        built = finish_builds(jobs, begun, functools.partial(progress, "build"))
        if workers:
            workers.end()
        clock("build")
        libraries = backend.assemble(built.values(), pieces)
        clock("assemble")
    return Outcome(built, tuner, objects, libraries)


def open_backend(config: CompileConfig, objects: Objects | None, turns: Path | None = None) -> Backend:
    """The backend a config asks for. Importing it takes a second where it is Inductor. objects: for C++, None in a
    process that only generates it. turns: where processes that use the same GPU take turns."""
    if config.backend == "eager":
        from graphllm.compile.codegen.backends import Eager

        return Eager()
    if config.backend == "prebuilt":
        from graphllm.compile.codegen.prebuilt.backend import Prebuilt

        return Prebuilt(objects)
    if config.target.device == "cpu":
        from graphllm.compile.codegen.backends import Cpu

        return Cpu(objects)
    from graphllm.compile.codegen.cuda import Cuda

    return Cuda(turns)


def open_tuner(
    config: CompileConfig, workers: Workers | None, progress: Callable[[int, int], None], folder: Path | None
) -> Tuner | None:
    """What finds launch constants, where a GPU's kernels are tuned."""
    if config.target.device == "cpu" or config.backend == "eager" or not config.tune:
        return None
    from graphllm.compile.tuning.tune import Tuner

    return Tuner(config, workers, progress, folder)


def sources_of(linked: Linked) -> list[Path]:
    """The C++ kernels in the folders of the model's ops. Which ones are called is known when pieces are lowered."""
    ops = (op_of(node.target) for piece in linked.pieces.values() for node in piece.graph.nodes)
    return sources_in({op.folder for op in ops if op is not None})


def begin_builds(
    linked: Linked,
    wanted: Sequence[Job],
    config: CompileConfig,
    backend: Backend,
    tuner: Tuner | None,
    workers: Workers | None,
) -> dict[Job, Callable[[], Built]]:
    """Tune, and begin every build; for each a function that waits for it, or builds it.

    Pieces of one op begin first, because their kernels compile while other pieces are built. They begin bucket by
    bucket: what a piece has built for one bucket it often finds for the next. Candidates of single ops begin at the
    largest sizes: attention of prompts compiles ten times as long as a linear layer, and others would wait for it.
    """
    begun: dict[Job, Callable[[], Built]] = {}
    buckets = list(dict.fromkeys(bucket for _, bucket in wanted))
    order = sorted(wanted, key=lambda job: (not linked.pieces[job[0]].boundary, buckets.index(job[1])))

    def begin(job: Job) -> None:
        piece, bucket = linked.pieces[job[0]].json, job[1]
        choices = {key: found.choice for key, found in tuner.measured.items()} if tuner else {}
        if workers is None:
            begun[job] = functools.partial(backend.build, piece, bucket, config, choices)
        else:
            begun[job] = workers.build(piece, bucket, choices).result

    if tuner is None:
        for job in order:
            begin(job)
        return begun
    first = sorted(order, key=lambda job: (not linked.pieces[job[0]].boundary, -buckets.index(job[1])))
    found = {(id, bucket): tuner.find(linked.pieces[id].json, bucket) for id, bucket in first}
    waiting = {job: tuner.add(sites()) for job, sites in found.items()}
    for job in order:
        if not waiting[job]:
            begin(job)
    for key in tuner.results():
        for job in order:
            if key in waiting[job]:
                waiting[job].remove(key)
                if not waiting[job]:
                    begin(job)
    return begun


def finish_builds(
    wanted: Sequence[Job], begun: Mapping[Job, Callable[[], Any]], progress: Callable[[int, int], None]
) -> dict[Job, Built]:
    """What was built, in the order in which it was wanted. Raises what a build raises."""
    done: dict[Job, Built] = {}
    for i, (job, result) in enumerate(begun.items()):
        progress(i, len(begun))
        done[job] = result()
    return {job: done[job] for job in wanted}
