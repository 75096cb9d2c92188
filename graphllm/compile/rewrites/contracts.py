"""The contracts of rewrites that are no passes over one unit: of the weight plan, a graph, a linked program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from torch.fx import Node

from graphllm.compile.trace import TracedGraph
from graphllm.config import CompileConfig
from graphllm.ir.graph import Shapes
from graphllm.weights.plan.plan import WeightPlan
from graphllm.weights.plan.schemes import Stored


class PlanSource(NamedTuple):
    """What passes over the plan look at.

    model_config: the model's ``config.json``.
    stored: the checkpoint's tensors; None where they are not known.
    config: the settings.
    """

    model_config: Mapping[str, Any]
    stored: Stored | None
    config: CompileConfig


PlanPass = Callable[[WeightPlan, PlanSource], WeightPlan]
GraphPass = Callable[[TracedGraph, WeightPlan, CompileConfig], TracedGraph]
Body = list[tuple[str, Node]]  # the calls of a linked program in order, each with its unit's name
LinkedPass = Callable[[Body, Collection[Node], Shapes, CompileConfig], Body]  # with the nodes that are its results
