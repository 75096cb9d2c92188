"""Counting the tokens of each expert: a table [layers, experts] that every layer of a step moves up by its row, so that
in the end row i is layer i's. Only artifacts that were compiled to count have it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from graphllm.config import CompileConfig, ConfigError
from graphllm.ir.graph import TensorSpec
from graphllm.ir.op import op_of
from graphllm.ops.moe.moe_route import moe_route
from graphllm.program.specs import OutputSpec
from graphllm.rewrite import Unit, results_of

EXPERTS, TABLE = "experts", "expert_tokens"
Values = dict[str, Any]


class ExpertCounter(NamedTuple):
    """layers: how many rows the table has. experts: how many columns. chosen: the experts of each token, [T, A]."""

    layers: int
    experts: int
    chosen: TensorSpec

    @property
    def output(self) -> OutputSpec:
        return OutputSpec(TABLE, (self.layers, self.experts), "int32", host=True)

    @property
    def table(self) -> TensorSpec:
        return TensorSpec.contiguous("int32", self.layers, self.experts)

    def begin(self, v: Values) -> tuple[Tensor]:
        """An empty table."""
        return (v["step.query_start_loc"].new_zeros((self.layers, self.experts)),)

    def add(self, v: Values) -> tuple[Tensor]:
        """The table with the tokens of one more layer, without those that pad the step."""
        experts_TA = v[EXPERTS]
        T, device = experts_TA.shape[0], experts_TA.device
        real_T = torch.arange(T, device=device) < v["step.query_start_loc"].amax()  # its last
        numbers_N = torch.arange(self.experts, device=device, dtype=torch.int32)
        hit_TAN = (experts_TA.unsqueeze(-1) == numbers_N) & real_T[:, None, None]
        return (torch.cat([v[TABLE][1:], hit_TAN.sum((0, 1), dtype=torch.int32).unsqueeze(0)]),)

    def skip(self, v: Values) -> tuple[Tensor]:
        """The table after a layer without experts."""
        return (torch.cat([v[TABLE][1:], torch.zeros_like(v[TABLE][:1])]),)


def count(layers: int, units: list[Unit], config: CompileConfig) -> ExpertCounter:
    """For a graph of ``layers`` layers, from a unit of each type. Raises ConfigError for a graph without experts."""
    routes = [node for unit in units if (node := _route(unit)) is not None]
    if not routes:
        name = "enable_eplb" if config.enable_eplb else "count_expert_tokens"
        raise ConfigError(f"{name} is set: this model has no experts; leave it out")
    logits, chosen = routes[0].args[0], _chosen(routes[0])
    assert isinstance(logits, Node)
    return ExpertCounter(layers, int(logits.meta["val"].shape[1]), units[0].shapes.spec(chosen.meta["val"]))


def with_experts(unit: Unit) -> Unit:
    """A layer's unit with the experts that its tokens choose as a further output, if it has any."""
    if (route := _route(unit)) is None:
        return unit
    output = unit.graph.output_node()
    results = (*results_of(unit), _chosen(route))
    output.args = (results,)
    output.meta["val"] = tuple(node.meta["val"] for node in results)
    return unit._replace(outputs=(*unit.outputs, EXPERTS))


def _route(unit: Unit) -> Node | None:
    return next((node for node in unit.graph.nodes if op_of(node.target) is moe_route), None)


def _chosen(route: Node) -> Node:
    return next(user for user in route.users if user.args[1] == 1)
