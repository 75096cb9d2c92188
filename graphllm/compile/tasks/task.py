"""The contract of a task: what a graph of a model is compiled for. A task adds units around the graph's own units, and
declares what they read, keep and make."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from graphllm.config import Bucket, CompileConfig
from graphllm.ir.graph import TensorSpec
from graphllm.ir.model import Graph, Model
from graphllm.ir.weight import Weight
from graphllm.program.program import DraftReach
from graphllm.program.specs import InputSpec, OutputSpec, StateSpec

Values = dict[str, Any]  # tensors by name: "step.<input>", "state.<name>", "w.<weight>", and what units make


class TaskUnit(NamedTuple):
    """A unit that a task adds.

    name: of the unit.
    run: makes the outputs of the values.
    outputs: names of what it makes.
    part: the part of the program that it begins; "" for none.
    weights: its parameters.
    states: states of layers that it reads, by their names in programs.
    """

    name: str
    run: Callable[[Values], tuple[Tensor, ...]]
    outputs: tuple[str, ...]
    part: str = ""
    weights: tuple[tuple[str, Weight], ...] = ()
    states: tuple[str, ...] = ()


class ProgramUnits(NamedTuple):
    """The units of one program.

    before: the task's, which come first.
    after: the task's, which come last.
    own: the graph's; see `graphllm.compile.trace.Program`.
    not_results: outputs of the task that need not be there in the end.
    """

    before: tuple[TaskUnit, ...] = ()
    after: tuple[TaskUnit, ...] = ()
    own: tuple[str, ...] = ("embed", "layers", "head")
    not_results: tuple[str, ...] = ()


class Task:
    """The task of one graph: an object for each graph of a model. This class adds nothing.

    model: the family, with all of its graphs.
    graph: the one that is compiled.
    c: the family's Config, of one rank.
    head_outputs: names of what the head makes.
    """

    head_outputs: tuple[str, ...] = ()

    def __init__(self, model: Model, graph: Graph, c: Any, config: CompileConfig) -> None:
        self.model, self.graph, self.c, self.config = model, graph, c, config

    def check(self, layers: Sequence[Sequence[StateSpec]]) -> None:
        """Raise ConfigError for settings that the model cannot serve. layers: the states of each layer."""

    def inputs(self) -> tuple[InputSpec, ...]:
        """What the task's units read of a step, in addition to what every graph may read."""
        return ()

    def states(self) -> tuple[StateSpec, ...]:
        """What the task's units keep."""
        return ()

    def buckets(self) -> tuple[Bucket, ...]:
        """The sizes that the graph is compiled for."""
        return self.graph.buckets(self.c) or self.config.buckets

    def programs(self, inputs: Collection[InputSpec], caches: Sequence[tuple[str, int]]) -> Mapping[str, ProgramUnits]:
        """The units of each program by its name. inputs: of the graph. caches: the keys and values of its layers, by
        their names in programs, each with its cache group."""
        return {self.graph.task: ProgramUnits()}

    def head(self, made: Any, v: Values) -> tuple[Tensor, ...]:
        """The outputs of the head, of what the graph's head function has made."""
        return () if made is None else (made,)

    def outputs(self, head: Sequence[TensorSpec]) -> tuple[OutputSpec, ...]:
        """What programs may leave. head: the specs of the head's outputs."""
        return ()

    def vector(self, head: Sequence[TensorSpec]) -> tuple[str, int]:
        """The symbol of the rows that have a vector, and its width; see `StepExecutor`."""
        return "R", 0

    def reach(self) -> DraftReach | None:
        """What the host must know of a draft graph; None for another graph."""
        return None
