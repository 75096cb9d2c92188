"""Graph rewrite: count the tokens of each expert.

Every layer of a step moves a table [layers, experts] up by one row, so that in the end row i is layer i's. Only
artifacts that were compiled to count have the table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from graphllm.compile.tasks.task import Values
from graphllm.compile.trace import TracedGraph
from graphllm.config import CompileConfig, ConfigError
from graphllm.ir.graph import TensorSpec
from graphllm.ir.op import op_of
from graphllm.ops.moe.moe_route import moe_route
from graphllm.program.specs import OutputSpec
from graphllm.rewrite import Unit, results_of
from graphllm.weights.plan.plan import WeightPlan

EXPERTS, TABLE = "experts", "expert_tokens"


def count_experts(graph: TracedGraph, plan: WeightPlan, config: CompileConfig) -> TracedGraph:
    """Units that count: before all layers and after each one. Raises ConfigError for a model without experts."""
    if graph.graph.task != "generate" or not config.counts_experts:
        return graph
    layers = {name: unit for name, unit in graph.units.items() if name.startswith("layer.")}
    made, trace = _counter(len(graph.layer_types), list(layers.values()), config), graph.tracer.trace
    table = {TABLE: made.table}
    units = {name: with_experts(unit) for name, unit in layers.items()}
    units["no_expert_tokens"] = trace("no_expert_tokens", {}, made.begin, (TABLE,))
    units["count_expert_tokens"] = trace("count_expert_tokens", {**table, EXPERTS: made.chosen}, made.add, (TABLE,))
    after = {}
    for i, layer_type in enumerate(graph.layer_types):
        after[i] = ("count_expert_tokens" if EXPERTS in units[f"layer.{layer_type}"].outputs else "skip_expert_tokens",)
    if ("skip_expert_tokens",) in after.values():
        units["skip_expert_tokens"] = trace("skip_expert_tokens", table, made.skip, (TABLE,))
    programs = {}
    for name, program in graph.programs.items():
        at = program.units.index("embed")
        order = (*program.units[:at], "no_expert_tokens", *program.units[at:])
        programs[name] = program._replace(units=order, results=(*program.results, made.output))
    return graph.with_units(units, after)._replace(programs=programs)


class ExpertCounter(NamedTuple):
    """Units over a table [layers, experts].

    layers: rows of the table.
    experts: columns of the table.
    chosen: spec of the experts of each token, [T, A].
    """

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


def _counter(layers: int, units: list[Unit], config: CompileConfig) -> ExpertCounter:
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
