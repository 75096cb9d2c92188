"""One graph of an artifact at run time: its inputs, and its programs bound to the sizes in which they run."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphllm.config import Bucket, ConfigError
from graphllm.program.linking import LinkedProgram, MemoryPlan, PieceCall
from graphllm.program.offloading import with_copies
from graphllm.program.program import ProgramGraph
from graphllm.program.schema import NEUTRAL
from graphllm.program.stages import Stage, stage_calls, stage_parts
from graphllm.runtime.binding import Bound, bind
from graphllm.runtime.kernels import Kernels
from graphllm.runtime.memory import padding
from graphllm.runtime.memory.memory import Array, Memory
from graphllm.runtime.memory.padding import Size
from graphllm.runtime.memory.staging import Staging, StepInput
from graphllm.runtime.stream import Job

if TYPE_CHECKING:
    from graphllm.runtime.cuda.graph_pool import GraphPool

_BOUND_KEPT = 128


class GraphPrograms:
    """A graph of an artifact, ready to be bound.

    pieces: their folder.
    outside: weights and states by name.
    arena: memory of intermediates.
    max_num_seqs: sequences of a step.
    longest_query: tokens of a sequence that verifies drafts.
    steps_in_flight: runs that may be prepared before the first of them has ended.
    stage: of a pipeline; only its calls run here.
    """

    def __init__(
        self,
        pieces: Path,
        graph: ProgramGraph,
        outside: Mapping[str, Array],
        arena: Array,
        memory: Memory,
        kernels: Kernels,
        max_num_seqs: int,
        longest_query: int,
        steps_in_flight: int,
        stage: Stage | None = None,
    ) -> None:
        self.name, self.task = graph.name, graph.task
        self.buckets, self.inputs, self.optional = graph.buckets, graph.inputs, graph.optional
        self._folder, self._programs = pieces, graph.programs
        self.outputs = frozenset(name for program in graph.programs.values() for name in program.host)
        self._outside, self._arena, self._memory = outside, arena, memory
        self._kernels, self._max_num_seqs = kernels, max_num_seqs
        self._longest_query, self._stage = longest_query, stage
        limits = [b.limits(max_num_seqs, longest_query) for b in self.buckets]
        self.most = {n: max(limit[n] for limit in limits) for n in "TSR"}
        self.staging = Staging(list(self.inputs.values()), self.most, memory, steps_in_flight)
        self.jobs: list[Job | None] = [None] * steps_in_flight  # that read each staging buffer
        self._buffer_index = 0
        self._bundles: dict[str, Any] = {}
        self._linked: dict[str, tuple[LinkedProgram, MemoryPlan]] = {}
        self._bound: OrderedDict[tuple[str, Size], BoundProgram] = OrderedDict()
        self._ran: dict[tuple[str, Bucket], set[str]] = {}  # parts of those that are not captured
        # One pool for all graphs, which never run at once: libraries take their workspace from it once.
        self._graph_pool = _graph_pool() if memory.device.type == "cuda" else None

    def pick(self, step: StepInput) -> Size:
        """What a batch is padded to."""
        exact = self._graph_pool is None
        tokens, sequences = max(step.tokens, step.pad_to), step.sequences
        if step.query_len:
            sequences = max(sequences, step.pad_to)
        return padding.pick(
            self.buckets, tokens, sequences, step.rows, step.query_len, self._max_num_seqs, exact, self._longest_query
        )

    def variant(self, program: str, step: StepInput) -> str:
        """The program of that name for a batch: without what only optional inputs are for when it has none of them."""
        if not self.optional or any(name in step.arrays for name in self.optional):
            return program
        return program + NEUTRAL

    def next_buffer(self) -> int:
        """A staging buffer that nothing reads any more."""
        index, self._buffer_index = self._buffer_index, (self._buffer_index + 1) % len(self.jobs)
        if (before := self.jobs[index]) is not None:
            before.result()
        return index

    def host_results(self, program: str) -> dict[str, str | int]:
        """The results that every run of a program copies to the host, with their number of rows: T, S, R or an int."""
        return self._programs[program].host

    def bound(self, name: str, size: Size) -> BoundProgram:
        """A program at a padded size, bound when it is first asked for."""
        key = (name, size)
        if key not in self._bound:
            linked, plan = self._link(name, size.bucket)
            outside = {**self._outside, **self.staging.tensors(size.symbols)}
            bound = bind(linked, plan, outside, self._arena, self._kernels, size.symbols, self._memory)
            captured = padding.is_captured(size.bucket, size.T)
            pool = self._graph_pool if captured else None
            ran = set() if captured else self._ran.setdefault((name, size.bucket), set())
            self._bound[key] = BoundProgram(bound, self._kernels, self._memory, pool, ran)
            if len(self._bound) > _BOUND_KEPT:
                self._bound.popitem(last=False)
        self._bound.move_to_end(key)
        return self._bound[key]

    def bound_last(self, count: int) -> list[tuple[str, Size]]:
        """Programs and sizes that were asked for last. In any thread."""
        return list(self._bound)[-count:]

    def has_run(self, name: str, size: Size, part: str = "") -> bool:
        """Whether a part of a program has run at a size, or at any where it is not captured: what it needs is loaded,
        and nothing is left to be captured. On a CPU nothing is."""
        if self._graph_pool is None:
            return True
        if padding.is_captured(size.bucket, size.T):
            return (name, size) in self._bound and part in self._bound[name, size].ran
        return part in self._ran.get((name, size.bucket), ())

    def release(self) -> None:
        """Forget what was bound and captured, and what it was bound to; nothing runs any more."""
        for bound in self._bound.values():
            bound.release()
        self._bound.clear()
        self._outside, self._arena = {}, None
        self.jobs = [None] * len(self.jobs)

    def _link(self, name: str, bucket: Bucket) -> tuple[LinkedProgram, MemoryPlan]:
        key = f"{bucket.name} {name}"
        if key not in self._linked:
            order = self._programs[name]
            calls = [PieceCall(self._bundle(p, bucket), inputs, outputs) for p, inputs, outputs in order.calls]
            parts = order.parts
            if self._stage is not None:
                parts = stage_parts(calls, parts, self._stage)
                calls = stage_calls(calls, order.results, self._stage)
            calls = with_copies(calls, self._outside)
            program, plan = LinkedProgram(calls, order.results, parts), order.memory[bucket.name]
            if plan.arena_bytes > self._arena.numel():
                raise ConfigError("the artifact's memory table is that of another version of graphllm; compile again")
            self._linked[key] = program, plan
        return self._linked[key]

    def _bundle(self, piece: str, bucket: Bucket) -> Any:
        file = f"{piece}-{bucket.name}.json"
        if file not in self._bundles:
            self._bundles[file] = json.loads((self._folder / file).read_text())
        return self._bundles[file]


class BoundProgram:
    """A bound program. With ``pool``, a memory pool, what can be is captured as CUDA graphs at a part's first run and
    replayed afterwards: one graph for the whole part when every piece is compiled, one between every two interpreted
    pieces or messages otherwise.

    on_host: results as the host sees them on a CPU.
    ran: the parts that have run.
    """

    def __init__(self, bound: Bound, kernels: Kernels, memory: Memory, pool: GraphPool | None, ran: set[str]) -> None:
        self.parts, self._pool, self.results, self.ran = bound.parts, pool, bound.results, ran
        self.on_host = {n: seen for n, t in self.results.items() if (seen := memory.on_host(t)) is not None}
        self._launches = {
            name: kernels.join([launch for _, ls in segments for launch in ls])
            for name, segments in bound.parts.items()
        }

    def run(self, part: str = "") -> None:
        """Run a part of the step on the current stream."""
        for launch in self._launches[part]:
            launch()
        if self._pool is not None and part not in self.ran:
            # This first run was real and warmed the libraries up. Capturing executes nothing, so no state is touched
            # twice.
            self._launches[part] = self._pool.captured(self.parts[part])
        self.ran.add(part)

    def release(self) -> None:
        """Forget what was bound and captured, whoever still holds this program."""
        self._launches.clear()
        self.parts, self.results, self.on_host = {}, {}, {}


def _graph_pool() -> GraphPool:
    from graphllm.runtime.cuda.graph_pool import GraphPool  # here, because it imports torch

    return GraphPool()
