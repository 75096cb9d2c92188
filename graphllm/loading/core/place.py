"""`RankPlace`: where a rank stands among all ranks of an engine, and the memory that its stage takes. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from graphllm.config import ConfigError, CoreConfig
from graphllm.loading.core.stored_weights import StoredWeights
from graphllm.program.manifest import MemoryTable
from graphllm.program.stages import Stage, message_bytes, own_states, own_tensors, stage_reads


class RankPlace(NamedTuple):
    """A rank's place among all ranks of an engine. An engine on one device is rank 0 of 1.

    rank: its number.
    degree: how many ranks there are.
    here: how many ranks are on each node.
    tensor: its number in its tensor-parallel group.
    width: ranks of a tensor-parallel group.
    stage: its stage of the pipeline; None where there is one stage.
    """

    rank: int
    degree: int
    here: int
    tensor: int
    width: int
    stage: Stage | None

    @property
    def local(self) -> int:
        """Its number on its node."""
        return self.rank % self.here

    @property
    def one_host(self) -> bool:
        """Whether the ranks of a stage are on one node."""
        return self.here % self.width == 0


def rank_place(config: CoreConfig, width: int, rank: int) -> RankPlace:
    """The place of one rank. The ranks of a stage are consecutive, and so are the ranks of a node. width: ranks of the
    tensor-parallel group."""
    stages = config.parallel.pipeline_parallel_size
    degree = width * stages
    here = config.parallel.ranks_of_node(degree)
    stage = Stage(rank // width, stages) if stages > 1 else None
    return RankPlace(rank, degree, here, rank % width, width, stage)


def stage_memory(stored: StoredWeights, stage: Stage | None) -> MemoryTable:
    """The memory that a stage takes. Raises ConfigError for an artifact that cannot have that number of stages."""
    artifact = stored.artifact
    if stage is None:
        return artifact.memory
    reads = stage_reads(artifact.program, stage)
    blocks = len(own_tensors(own_states(artifact.program, reads))) * artifact.program.blocks.bytes
    weights = sum(entry.nbytes for entry in stored.plan.chosen(reads) if not entry.tie)
    messages = message_bytes(artifact, stage).memory
    return msgspec.structs.replace(artifact.memory, weights=weights, block=blocks, messages=messages)


def node_count(degree: int, width: int, sizes: Sequence[int], wanted: int, resource: str) -> int:
    """How many nodes of a Ray cluster an engine takes: as few as can be, with all ranks of a stage on one node where
    that can be.

    degree: ranks of the engine.
    width: ranks of a stage.
    sizes: devices of each node of the cluster.
    wanted: the number of nodes that the user wants; 1 for any.

    Raises ConfigError."""

    def fits(count: int) -> bool:
        return degree % count == 0 and sum(size >= degree // count for size in sizes) >= count

    if wanted > 1:
        candidates: Iterator[int] = iter([wanted])
    else:
        counts = range(1, degree + 1)
        inside = [count for count in counts if degree % count == 0 and degree // count % width == 0]
        candidates = iter([*inside, *(count for count in counts if count not in inside)])
    for count in candidates:
        if fits(count):
            return count
    said = f" on {wanted} nodes" if wanted > 1 else ""
    raise ConfigError(
        f"distributed_executor_backend is ray: tensor_parallel_size times pipeline_parallel_size is {degree}{said}, "
        f"and the nodes of the cluster have {', '.join(map(str, sizes)) or 'no'} {resource}s; give less, or add nodes"
    )
