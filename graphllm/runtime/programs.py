"""`Programs`: the graphs of an artifact with the memory that they need. On a CPU an executor may get others."""

from __future__ import annotations

from collections.abc import Mapping

from graphllm.program.artifact import Artifact
from graphllm.program.linking import ZEROED
from graphllm.program.schema import CacheLayout
from graphllm.program.specs import InputSpec
from graphllm.program.stages import Stage
from graphllm.runtime.drafting import RUNS_OF_A_STEP, drafter_of
from graphllm.runtime.graphs import GraphPrograms
from graphllm.runtime.host_results import HostResults
from graphllm.runtime.kernels import Kernels
from graphllm.runtime.memory.memory import Array, Memory


class Programs:
    """The graphs of one artifact, each with its staging memory, and one memory for what they make.

    outside: weights and states by name.
    in_flight: steps that may be prepared before the first of them has ended.
    stage: of a pipeline; only its calls run here.

    folder: of the artifact.
    graphs: by name.
    main: the graph of a step.
    drafter: runs after it.
    on_host: copies of its results.
    arena: memory of what kernels hand on within a step.
    encoder: the graph that encodes items; None without one.
    snapshots: the graph that saves and loads snapshots in 8 bits; None without one. All stages run it.
    """

    def __init__(
        self,
        artifact: Artifact,
        outside: Mapping[str, Array],
        memory: Memory,
        kernels: Kernels,
        layout: CacheLayout,
        in_flight: int,
        stage: Stage | None = None,
    ) -> None:
        program, config = artifact.program, artifact.config
        self.folder, self.kernels = artifact.folder, kernels
        given = {**outside, ZEROED: memory.zeros((max(artifact.memory.zeroed, 1),), "int32")}
        self.arena = arena = memory.scratch(max(artifact.memory.arena, 1))
        self.graphs = {
            g.name: GraphPrograms(
                artifact.pieces,
                g,
                given,
                arena,
                memory,
                kernels,
                config.max_num_seqs,
                config.longest_query,
                in_flight * RUNS_OF_A_STEP.get(g.task, 1),
                None if g.task == "snapshots" else stage,
            )
            for g in program.graphs
        }
        self.main = next(iter(self.graphs.values()))
        self.drafter = drafter_of(self.graphs.values(), layout, program.drafts)
        self.on_host = HostResults(memory, self.main, in_flight)
        self.encoder = next((g for g in self.graphs.values() if g.task == "encode"), None)
        self.snapshots = next((g for g in self.graphs.values() if g.task == "snapshots"), None)

    @property
    def item_input(self) -> tuple[InputSpec | None, int]:
        """What an encoder reads of an item, and of how many tokens at most; nothing without one."""
        if self.encoder is None:
            return None, 0
        found = (spec for spec in self.encoder.inputs.values() if spec.provider == "item")
        return next(found, None), self.encoder.most["T"]

    def bind_as(self, other: Programs) -> None:
        """Bind what another artifact's programs were bound to last. They may be running."""
        for name, graph in self.graphs.items():
            for program, size in other.graphs[name].bound_last(_AHEAD):
                graph.bound(program, size)

    def release(self) -> None:
        """Forget what was bound and captured; nothing runs any more."""
        self.arena = None
        for graph in self.graphs.values():
            graph.release()


_AHEAD = 32  # sizes of a graph: a size of a long prompt seldom comes again
