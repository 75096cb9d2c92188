"""Linear layers that LoRA adapters may change, and which modules of a checkpoint they are made of. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from graphllm.weights.expr import Concat, Decode, Expr, Permute, Read, Slice

if TYPE_CHECKING:  # plan imports torch
    from graphllm.weights.plan import WeightPlan


class AdapterPart(NamedTuple):
    """One of the matrices that a linear layer consists of. modules: what the checkpoint calls it, one of them, such as
    "model.layers.0.self_attn.q_proj". start, stop: which of its outputs these are; stop is 0 for all."""

    modules: tuple[str, ...]
    start: int
    stop: int


class AdaptedLinear(NamedTuple):
    """A linear layer that adapters may change.

    name: in the weight plan, such as "layers.0.qkv"; its tables are the states "<name>.lora_a" [n r, I] (r rows for
    each of n parts) and "<name>.lora_b" [r, O], as the op `add_lora` says. inputs: I. widths: outputs of each part.
    """

    name: str
    inputs: int
    widths: tuple[int, ...]
    parts: tuple[AdapterPart, ...]


def adapted_linear(plan: WeightPlan, name: str) -> AdaptedLinear | None:
    """How adapters find an entry of the plan; None for what is no matrix of whole rows of a checkpoint's modules."""
    expr, shape = plan.expr_of(name), plan[name].shape
    if len(shape) != 2:
        return None
    if plan[name].tie:  # PEFT knows it by a name of its own, though its numbers are those of another
        return AdaptedLinear(name, shape[1], (shape[0],), (AdapterPart((name.rpartition(".")[2],), 0, 0),))
    matrices = expr.parts if isinstance(expr, Concat) and expr.dim == 0 else (expr,)
    parts = [_part(matrix) for matrix in matrices]
    if any(part is None for part in parts):
        return None
    found = tuple(part for part in parts if part is not None)
    return AdaptedLinear(name, shape[1], tuple(matrix.shape[0] for matrix in matrices), found)


def linear_from(plain: list[object]) -> AdaptedLinear:
    """What was written as JSON."""
    name, inputs, widths, parts = plain
    found = tuple(AdapterPart(tuple(modules), start, stop) for modules, start, stop in parts)  # type: ignore[attr-defined]
    return AdaptedLinear(str(name), int(inputs), tuple(widths), found)  # type: ignore[call-overload, arg-type]


def _part(expr: Expr) -> AdapterPart | None:
    start = stop = 0
    if isinstance(expr, Slice) and expr.dim == 0 and not expr.per_rank:
        start, stop, expr = expr.start, expr.stop, expr.part
    if isinstance(expr, Permute) and isinstance(expr.part, Read) and not stop:
        expr = expr.part
    if isinstance(expr, Decode):  # of parts such as "....q_proj.qweight"
        first = expr.parts[0]
        expr = first.part if isinstance(first, Permute) else first
    if not isinstance(expr, Read):
        return None
    return AdapterPart(tuple(source.rpartition(".")[0] for source in expr.sources), start, stop)
