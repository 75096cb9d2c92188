"""The draft graph's runs after a step: once over the step's tokens, then once for each further draft. They follow the
step on the device. The host prepares their inputs with the step's and learns nothing of the drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from graphllm.config.token_tree import DynamicTree, TokenTree
from graphllm.program.program import DraftReach
from graphllm.runtime.graphs import GraphPrograms
from graphllm.runtime.memory.staging import StepInput
from graphllm.runtime.stream import Job


class DraftRuns(NamedTuple):
    """Prepared runs. run: on the device, in order with the step. buffers: the staging buffers that it reads."""

    graph: GraphPrograms
    buffers: tuple[int, ...]
    run: Callable[[], None]

    def belong_to(self, job: Job) -> None:
        """The buffers are free when that job has ended."""
        for index in self.buffers:
            self.graph.jobs[index] = job


class DraftShape(NamedTuple):
    """How a draft graph makes its drafts.

    one_row_more: the first run has the step's tokens and one more of each sequence.
    at_once: drafts of a single run, 0 where each run makes one.
    tree: the tree that the runs fill, level by level; None for a chain of drafts.
    block: rows of each sequence in the second run, which makes all drafts; 0 without blocks.
    """

    one_row_more: bool
    at_once: int
    tree: TokenTree | DynamicTree | None
    block: int

    @classmethod
    def of(cls, reach: DraftReach, tree: TokenTree | DynamicTree | None) -> DraftShape:
        """As the artifact says; tree: that steps verify."""
        return cls(reach.one_row_more, reach.at_once, tree if reach.by_levels else None, reach.block)


def _inner_nodes(tree: TokenTree | DynamicTree, sequences: int, kept: Mapping[str, np.ndarray]) -> StepInput:
    """Rows of each sequence for the nodes of a tree that have children. In a dynamic tree only the device knows these
    nodes."""
    if isinstance(tree, DynamicTree):
        return _alike(sequences, max(tree.rows, 1), kept)
    inner, count = tree.inner, len(tree.inner)
    bits = [sum(1 << i for i, other in enumerate(inner) if tree.ancestors[node] >> other & 1) for node in inner]
    rows = _alike(sequences, count, kept)
    return rows._replace(arrays={**rows.arrays, "ancestors": np.tile(np.array(bits, dtype=np.int64), sequences)})


def _alike(sequences: int, count: int, kept: Mapping[str, np.ndarray]) -> StepInput:
    """A step of ``count`` rows of each sequence."""
    n = np.arange(sequences + 1, dtype=np.int32)
    rows = {"query_start_loc": n * count, "sequence_ids": np.repeat(n[:-1], count)}
    return StepInput(count * sequences, sequences, count * sequences, count, {**kept, **rows})


def prepare_drafts(graph: GraphPrograms, step: StepInput, count: int, shape: DraftShape) -> DraftRuns:
    """Stage the runs that draft ``count`` tokens for each sequence of a step. The first run is there even for none: it
    writes the draft graph's own states for the step's tokens."""
    given, n = step.arrays, np.arange(step.sequences + 1, dtype=np.int32)
    kept = {name: given[name] for name, spec in graph.inputs.items() if name in given and spec.shape[0] == "S"}
    further = _alike(step.sequences, shape.block or 1, kept)
    # What is kept of a tree is a run of tokens, and rows that are sampled from are the draft graph's own matter.
    other = ("ancestors", "logits_indices")
    first = step._replace(arrays={name: array for name, array in given.items() if name not in other})
    if shape.tree is not None:
        first = first._replace(rows=step.sequences)
        further = _inner_nodes(shape.tree, step.sequences, kept)
    if shape.one_row_more:
        starts = given["query_start_loc"] + n
        rows = {"query_start_loc": starts, "sequence_ids": np.repeat(n[:-1], np.diff(starts))}
        query_len = step.query_len + 1 if step.query_len else 0
        first = StepInput(step.tokens + step.sequences, step.sequences, step.sequences, query_len, {**kept, **rows})
    runs = min(count, 1) if shape.block else 0 if shape.at_once else max(count - 1, 0)
    staged = []
    for program, batch, times in (("first", first, 1), ("next", further, runs)):
        if times:
            size, index = graph.pick(batch), graph.next_buffer()
            graph.staging.fill(index, batch, size.symbols)
            staged.append((index, size.symbols, graph.bound(program, size), times))

    def run() -> None:
        for index, symbols, bound, times in staged:
            graph.staging.upload(index, symbols)
            for _ in range(times):
                bound.run()

    return DraftRuns(graph, tuple(index for index, *_ in staged), run)
