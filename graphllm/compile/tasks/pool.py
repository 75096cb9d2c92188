"""Pooling: the head makes a vector of each sequence or of each token, and every step copies the vectors to the host."""

from __future__ import annotations

from collections.abc import Sequence

from graphllm.compile.tasks.task import Task
from graphllm.ir.graph import GraphError, TensorSpec
from graphllm.program.specs import OutputSpec


class Pool(Task):
    """The task of an embedder, a classifier or a reward model."""

    head_outputs = ("pooled",)

    def outputs(self, head: Sequence[TensorSpec]) -> tuple[OutputSpec, ...]:
        return (OutputSpec("pooled", head[0].shape, head[0].dtype, host=True),)

    def vector(self, head: Sequence[TensorSpec]) -> tuple[str, int]:
        """Raises GraphError for a head that makes no vectors."""
        symbol, *rest = head[0].shape
        if symbol not in ("R", "T") or len(rest) != 1 or not isinstance(rest[0], int):
            raise GraphError(
                f"the head of {self.graph.name or 'the model'} gives {head[0]}; the task pool takes [R, D] or [T, D]"
            )
        return str(symbol), rest[0]
