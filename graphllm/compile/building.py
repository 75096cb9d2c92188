"""BUILD: every distinct piece for every bucket, each as soon as its sites are tuned.

With worker processes, the workers first find and compile candidates, then build pieces without choices. At the same
time this process times candidates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from graphllm.compile.link import Linked
from graphllm.config import Bucket, CompileConfig

if TYPE_CHECKING:
    from graphllm.compile.codegen.backends import Backend
    from graphllm.compile.codegen.jobs import Built
    from graphllm.compile.tuning.tune import Tuner
    from graphllm.compile.tuning.workers import Workers

Job = tuple[str, Bucket]  # a piece's id


def begin_builds(
    linked: Linked,
    wanted: Sequence[Job],
    config: CompileConfig,
    backend: Backend,
    tuner: Tuner | None,
    workers: Workers | None,
) -> dict[Job, Callable[[], Built]]:
    """Tune, and begin every build; returns by job the function that waits for the build, or does it.

    Pieces of one op come first, since their kernels compile during the others. The others follow bucket by bucket: a
    piece often finds for a bucket what it has built for the one before. Candidates begin with single ops at the largest
    sizes: attention of prompts compiles ten times as long as a linear layer, and the others would wait for it.
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
