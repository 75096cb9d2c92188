"""The draft graph's runs after a step: once over the step's tokens, then once for each further draft. They follow the
step on the device; the host prepares their inputs with the step's and learns nothing of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from graphllm.config.token_tree import DynamicTree, TokenTree
from graphllm.program.program import DraftReach
from graphllm.program.schema import CacheLayout
from graphllm.program.specs import InputSpec
from graphllm.runtime.graphs import GraphPrograms
from graphllm.runtime.memory.staging import StepInput
from graphllm.runtime.stream import Job, nothing

DRAFT_STATES = ("drafts", "tree_parents")  # what the host may ask for: drafts, and the tree of dynamic ones
RUNS_OF_A_STEP = {"draft": 2, "snapshots": 2}  # by task, how many runs of a graph a step prepares, where it is not one


class DraftRuns(NamedTuple):
    """Prepared runs.

    run: run them on the device, in order with the step.
    belong_to: the staging buffers that they read are free when this job has ended.
    buffers: these staging buffers.
    """

    run: Callable[[], None]
    belong_to: Callable[[Job], None]
    buffers: tuple[int, ...] = ()


NO_DRAFTS = DraftRuns(nothing, lambda job: None)


class Drafter:
    """An executor without a draft graph.

    drafts: whether there is a draft graph.
    inputs: what it reads of a step.
    """

    drafts = False
    inputs: Mapping[str, InputSpec] = {}

    def prepare(self, step: StepInput) -> DraftRuns:
        """Stage the runs after a step."""
        return NO_DRAFTS


class GraphDrafter(Drafter):
    """A draft graph. layout: how many drafts a step verifies. reach: what the artifact says of the graph."""

    drafts = True

    def __init__(self, graph: GraphPrograms, layout: CacheLayout, reach: DraftReach) -> None:
        self._graph, self._layout, self._shape = graph, layout, DraftShape.of(reach, layout.tree)
        self.inputs = graph.inputs

    def prepare(self, step: StepInput) -> DraftRuns:
        query_len = self._layout.query_lens[-1] if step.num_drafts is None else step.num_drafts + 1
        return prepare_drafts(self._graph, step, self._layout.ahead(query_len) - 1, self._shape)


def drafter_of(graphs: Iterable[GraphPrograms], layout: CacheLayout, reach: DraftReach) -> Drafter:
    """What drafts after the steps of an executor with these graphs."""
    graph = next((g for g in graphs if g.task == "draft"), None)
    return Drafter() if graph is None else GraphDrafter(graph, layout, reach)


class DraftShape(NamedTuple):
    """How a draft graph runs.

    one_row_more: the first run has the step's tokens and one row more of each sequence.
    at_once: drafts of the only run; 0 where each run makes one.
    tree: that the drafts fill, level by level; None where they are one run.
    block: rows of each sequence in the one further run, which makes all drafts; the first run makes none.
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
    """Rows of each sequence for the nodes of a tree that have children."""
    rows, bits = _alike(sequences, max(tree.rows, 1), kept), tree.ancestors_of_rows
    if not bits:  # the device knows which ones they are
        return rows
    return rows._replace(arrays={**rows.arrays, "ancestors": np.tile(np.array(bits, dtype=np.int64), sequences)})


def _alike(sequences: int, count: int, kept: Mapping[str, np.ndarray]) -> StepInput:
    """A number of rows of each sequence."""
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

    buffers = tuple(index for index, *_ in staged)

    def belong_to(job: Job) -> None:
        for index in buffers:
            graph.jobs[index] = job

    return DraftRuns(run, belong_to, buffers)
