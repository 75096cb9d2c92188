"""add_adapters: the low-rank products of a step's adapters, behind the linear layers of the model's layers and, where
that is asked for, behind its head."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from graphllm.config import CompileConfig
from graphllm.ir.graph import TensorSpec
from graphllm.ir.op import op_of
from graphllm.ir.specs import InputSpec, StateSpec
from graphllm.ops.add_lora import add_lora
from graphllm.ops.linear import linear
from graphllm.rewrite import PassReport, Unit, fake_values, register_pass
from graphllm.weights.adapted import AdaptedLinear, adapted_linear
from graphllm.weights.plan import WeightPlan

_OF_TOKENS = InputSpec("adapter_ids", ("T",), provider="adapter_ids")
_OF_ROWS = InputSpec("row_adapter_ids", ("R",), provider="adapter_ids")
_HEAD = "lm_head"  # what checkpoints call the head, whatever it is tied to


@register_pass(numerics="changes")
def add_adapters(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Put `add_lora` behind every `linear` of a layer whose weight is made of modules of the checkpoint, such as q, k
    and v. Its tables are states of axis "adapter". It stands before quantization and fusion: steps without an adapter
    run programs without it (`compile/variants.py`), which keep each of these. The head has one only if
    `lora_target_modules` names it: its tables are as long as the vocabulary."""
    is_head = unit.name == "head" and _HEAD in config.lora_target_modules
    if not config.enable_lora or unit.prefix or not (unit.layers or is_head):
        return PassReport(0)
    ids = _OF_ROWS if is_head else _OF_TOKENS
    states: list[StateSpec] = []
    notes = []
    for node in [n for n in unit.graph.nodes if op_of(n.target) is linear]:
        given = linear.bind(node.args, node.kwargs)
        weight = given["weight_OI"]
        label = weight.meta.get("label", "")
        if not label.startswith("w.") or len(weight.users) != 1:
            continue
        name = label.removeprefix("w.")
        entries = [entry for entry in unit.entries(name) if not plan[entry].exact]
        found = [adapted_linear(plan, entry) for entry in entries]
        if not found or found[0] is None or not _wanted(found[0], config):
            continue
        own = _tables(f"{unit.name}.{name}" if is_head else name, found[0], config.max_lora_rank)
        _add(unit, node, given["x_TI"], own, ids, found[0].widths, config)
        states += own
        notes.append(f"{name}: {', '.join(part.modules[0].rpartition('.')[2] for part in found[0].parts)}")
    return PassReport(len(notes), tuple(notes), None, tuple(states), (ids,) if notes else ())


def _wanted(layer: AdaptedLinear, config: CompileConfig) -> bool:
    """Whether one of its modules is among those that adapters may change."""
    suffixes = {module.rpartition(".")[2] for part in layer.parts for module in part.modules}
    return not config.lora_target_modules or bool(suffixes & set(config.lora_target_modules))


def _tables(name: str, layer: AdaptedLinear, rank: int) -> tuple[StateSpec, StateSpec]:
    return (
        StateSpec(f"{name}.lora_a", "adapter", (len(layer.widths) * rank, layer.inputs)),
        StateSpec(f"{name}.lora_b", "adapter", (rank, sum(layer.widths))),
    )


def _add(
    unit: Unit, node: Node, x_TI: Node, tables: tuple[StateSpec, ...], ids: InputSpec, widths: tuple[int, ...],
    config: CompileConfig,
) -> None:  # fmt: skip
    """The op behind a call of `linear`, for everything that reads it."""
    entries = config.max_loras + 1
    a_LRI, b_LrO = (
        _input(unit, f"state.{s.name}", TensorSpec.contiguous(config.dtype, entries, *s.shape)) for s in tables
    )
    adapter_ids = _input(unit, f"step.{ids.name}", TensorSpec.contiguous(ids.dtype, *ids.shape))
    with unit.graph.inserting_after(node):
        arguments: dict[str, Any] = {
            "y_TO": node, "x_TI": x_TI, "a_LRI": a_LRI, "b_LrO": b_LrO, "adapter_ids_T": adapter_ids,
            "widths": list(widths),
        }  # fmt: skip
        made = unit.graph.call_function(add_lora.overload, kwargs=arguments)
    with unit.shapes.mode, torch.no_grad():
        made.meta["val"] = add_lora.overload(**fake_values(arguments))
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def _input(unit: Unit, label: str, spec: TensorSpec) -> Node:
    """The unit's input of that name, which is made where there is none."""
    nodes = unit.graph.find_nodes(op="placeholder")
    for node in nodes:
        if node.meta["label"] == label:
            return node
    with unit.graph.inserting_before(nodes[0]):
        made = unit.graph.placeholder(label.replace(".", "_"))
    made.meta.update(val=unit.shapes.tensor(spec), label=label)
    return made
