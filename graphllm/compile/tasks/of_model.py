"""The tasks there are, by the names that model families give, and the task of each graph of a model."""

from __future__ import annotations

from typing import Any

from graphllm.compile.tasks.draft import Draft
from graphllm.compile.tasks.generate import Generate
from graphllm.compile.tasks.pool import Pool
from graphllm.compile.tasks.snapshots import Snapshots
from graphllm.compile.tasks.task import Task
from graphllm.config import CompileConfig
from graphllm.ir.model import Model

TASKS: dict[str, type[Task]] = {
    "generate": Generate, "pool": Pool, "encode": Task, "draft": Draft, "snapshots": Snapshots
}  # fmt: skip


def tasks_of(model: Model, c: Any, config: CompileConfig) -> list[Task]:
    """A task for each graph, in the order of the graphs. c: the Config of one rank."""
    return [TASKS[graph.task](model, graph, c, config) for graph in model.graphs]
