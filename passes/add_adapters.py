"""add_adapters: the low-rank products of a step's adapters, after the linear layers of the model's layers and, where
that is asked for, in its experts and after its embedding and its head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from graphllm.config import CompileConfig, ConfigError
from graphllm.ir.graph import TensorSpec
from graphllm.ir.op import Op, op_of
from graphllm.ops.embeddings.embedding import embedding
from graphllm.ops.gemm.linear import linear
from graphllm.ops.lora.add_embedding_lora import add_embedding_lora
from graphllm.ops.lora.add_lora import add_lora
from graphllm.ops.moe.fused_moe import fused_moe
from graphllm.ops.moe.fused_moe.operands import LORA_TABLES
from graphllm.program.specs import InputSpec, StateSpec
from graphllm.rewrite import PassReport, Unit, fake_values, register_pass
from graphllm.weights.adapters.adapted import AdaptedLinear, adapted_layer
from graphllm.weights.plan.plan import WeightPlan

_OF_TOKENS = InputSpec("adapter_ids", ("T",), provider="adapter_ids")
_OF_ROWS = InputSpec("row_adapter_ids", ("R",), provider="adapter_ids")


@register_pass(numerics="changes")
def add_adapters(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Put `add_lora` after every `linear` of a layer with a weight made of modules of the checkpoint, such as q, k and
    v. Its tables are states of axis "adapter". It stands before quantization and fusion: steps without an adapter run
    programs without it (`compile/variants.py`), which keep each of these. The head, experts (which have adapters as
    arguments) and the embedding have some only if `lora_target_modules` names them: their tables are large."""
    if not config.enable_lora or unit.prefix or not (unit.layers or unit.name in ("embed", "head")):
        return PassReport(0)
    ids = _OF_ROWS if unit.name == "head" else _OF_TOKENS
    states: list[StateSpec] = []
    notes = []
    for node in list(unit.graph.nodes):
        op = op_of(node.target)
        if op is None or op.name not in _CHANGES:
            continue
        weights, change = _CHANGES[op.name]
        given = op.bind(node.args, node.kwargs)
        found = [_layer(unit, plan, given[weight], config) for weight in weights]
        layers = [layer for layer in found if layer is not None]
        if len(layers) != len(found):
            continue
        if op is fused_moe and config.enable_eplb:
            raise ConfigError(
                f"lora_target_modules is {', '.join(config.lora_target_modules)}: with enable_eplb experts move "
                "between ranks, and their adapters would not; leave the experts or enable_eplb out"
            )
        tables = [_tables(unit, layer, config) for layer in layers]
        change(unit, node, layers, [t for pair in tables for t in pair], _ids(unit, ids))
        states += [state for layer in layers for state in layer.states]
        notes += [f"{layer.name}: {layer.modules}" for layer in layers]
    return PassReport(len(notes), tuple(notes), None, tuple(states), (ids,) if notes else ())


class _Layer(NamedTuple):
    """A weight of a unit that adapters change. name: in the unit. adapted: what the first of its entries is made of."""

    name: str
    adapted: AdaptedLinear
    states: tuple[StateSpec, StateSpec]

    @property
    def modules(self) -> str:
        modules = (
            [part.modules for part in self.adapted.parts] if self.adapted.parts[0].modules else [self.adapted.stacked]
        )
        return ", ".join(names[0].rpartition(".")[2] for names in modules)


def _layer(unit: Unit, plan: WeightPlan, weight: Any, config: CompileConfig) -> _Layer | None:
    """None for what adapters do not change."""
    label = weight.meta.get("label", "")
    if not label.startswith("w.") or len(weight.users) != 1:
        return None
    name = label.removeprefix("w.")
    first = next(iter(unit.entries(name)), None)
    found = None if first is None else adapted_layer(plan, first)
    if first is None or found is None:
        return None
    if plan[first].exact and len(found.parts) == 1:  # a router by itself is no module in PEFT's models
        return None
    wanted = bool(found.names & set(config.lora_target_modules))
    plain = not config.lora_target_modules and found.kind == "linear" and bool(unit.layers)
    if not (wanted or plain):
        return None
    shapes = found.own_tables(config.max_lora_rank)
    state = name if unit.layers else f"{unit.name}.{name}"
    a, b = (StateSpec(f"{state}.lora_{n}", "adapter", shape) for n, shape in zip("ab", shapes, strict=True))
    return _Layer(name, found, (a, b))


def _tables(unit: Unit, layer: _Layer, config: CompileConfig) -> tuple[Node, ...]:
    entries = config.max_loras + 1
    specs = (TensorSpec.contiguous(config.dtype, entries, *state.shape) for state in layer.states)
    return tuple(unit.input(f"state.{s.name}", spec) for s, spec in zip(layer.states, specs, strict=True))


def _ids(unit: Unit, ids: InputSpec) -> Node:
    return unit.input(f"step.{ids.name}", TensorSpec.contiguous(ids.dtype, *ids.shape))


def _behind_linear(unit: Unit, node: Node, layers: list[_Layer], tables: list[Node], ids: Node) -> None:
    x_TI = linear.bind(node.args, node.kwargs)["x_TI"]
    named = {"x_TI": x_TI, "a_LRI": tables[0], "b_LrO": tables[1], "widths": list(layers[0].adapted.own_widths)}
    _behind(unit, node, add_lora, {"y_TO": node, **named, "adapter_ids_T": ids})


def _behind_embedding(unit: Unit, node: Node, layers: list[_Layer], tables: list[Node], ids: Node) -> None:
    given = embedding.bind(node.args, node.kwargs)
    named = {"token_ids_T": given["token_ids_T"], "scale": given["scale"], "a_LVr": tables[0], "b_LrD": tables[1]}
    _behind(unit, node, add_embedding_lora, {"y_TD": node, **named, "adapter_ids_T": ids})


def _in_experts(unit: Unit, node: Node, layers: list[_Layer], tables: list[Node], ids: Node) -> None:
    given = fused_moe.bind(node.args, node.kwargs)
    unit.replace(node, fused_moe, **{**given, **dict(zip(LORA_TABLES, tables, strict=True)), "adapter_ids_T": ids})


# By op: its weights that adapters change, and how.
_CHANGES: dict[str, tuple[tuple[str, ...], Callable[..., None]]] = {
    "linear": (("weight_OI",), _behind_linear),
    "embedding": (("table_VD",), _behind_embedding),
    "fused_moe": (("gate_up_N2FD", "down_NDF"), _in_experts),
}


def _behind(unit: Unit, node: Node, op: Op, arguments: dict[str, Any]) -> None:
    """A call of an op after a node, for everything that reads the node."""
    with unit.graph.inserting_after(node):
        made = unit.graph.call_function(op.overload, kwargs=arguments)
    with unit.shapes.mode, torch.no_grad():
        made.meta["val"] = op.overload(**fake_values(arguments))
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
