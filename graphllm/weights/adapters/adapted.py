"""What LoRA adapters may change: linear layers, embeddings and experts, and which modules of a checkpoint they are made
of. No torch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from graphllm.weights.plan.division import Division
from graphllm.weights.plan.expr import Concat, Decode, Expr, Permute, Read, Reshape, Slice, Stack, walk

if TYPE_CHECKING:  # plan imports torch
    from graphllm.weights.plan.plan import WeightPlan

# By kind and dimension of the weight that ranks divide: the dimensions of both tables that go with it.
_DIVIDED: dict[tuple[str, int], dict[str, int]] = {
    ("linear", 0): {"b": 1},
    ("linear", 1): {"a": 1},
    ("embedding", 0): {"a": 0},
    ("embedding", 1): {"b": 1},
    ("experts", 0): {"a": 0, "b": 0},
    ("experts", 1): {"b": 2},
    ("experts", 2): {"a": 2},
}


class AdapterPart(NamedTuple):
    """One of the matrices that a linear layer consists of. modules: what the checkpoint calls it, one of them, such as
    "model.layers.0.self_attn.q_proj", or "model.layers.0.mlp.experts.{}.up_proj" of as many experts; none where they
    are one tensor. start, stop: which of its outputs these are; stop is 0 for all."""

    modules: tuple[str, ...]
    start: int
    stop: int


class AdaptedLinear(NamedTuple):
    """A linear layer that adapters may change, an embedding, or one of the two layers of all experts of a layer.

    name: in the weight plan, such as "layers.0.qkv"; its tables are the states "<name>.lora_a" [n r, I] (r rows for
    each of n parts) and "<name>.lora_b" [r, O], as the op `add_lora` says. inputs: I. widths: outputs of each part. Of
    an embedding I is the vocabulary, and the first table is the other way round, [I, r]. experts: how many have such
    tables, one after the other. stacked: what PEFT calls the tensor of all experts' matrices, one of them, such as
    "model.layers.0.mlp.experts.gate_up_proj". turns: how many outputs of each kind follow in a turn, where they are
    stored by turns and the layer has one kind after the other; else empty. All of this is of the whole layer; division:
    what a tensor-parallel rank has of its weight."""

    name: str
    inputs: int
    widths: tuple[int, ...]
    parts: tuple[AdapterPart, ...]
    kind: Literal["linear", "embedding", "experts"] = "linear"
    experts: int = 0
    stacked: tuple[str, ...] = ()
    turns: tuple[int, ...] = ()
    division: Division | None = None

    def tables(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of both tables for that rank."""
        lead, n = (self.experts,) if self.experts else (), len(self.parts)
        a = (self.inputs, rank) if self.kind == "embedding" else (n * rank, self.inputs)
        return (*lead, *a), (*lead, rank, sum(self.widths))

    def own_tables(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of what one of the ranks has of both tables."""
        a, b = self.tables(rank)
        return self._own_shape(a, "a"), self._own_shape(b, "b")

    def _own_shape(self, shape: tuple[int, ...], table: str) -> tuple[int, ...]:
        if (divided := self.divided(table)) is None:
            return shape
        dim, division = divided
        return (*shape[:dim], division.own, *shape[dim + 1 :])

    def divided(self, table: str) -> tuple[int, Division] | None:
        """The dimension of a table, "a" or "b", that is divided among the ranks, and how."""
        dim = None if self.division is None else _DIVIDED[self.kind, self.division.dim].get(table)
        return None if self.division is None or dim is None else (dim, self.division)

    @property
    def own_widths(self) -> tuple[int, ...]:
        """Of a linear layer, the outputs of each part that one of the ranks has. Raises ValueError where a part does
        not end with one of the pieces that are divided apart."""
        if (divided := self.divided("b")) is None:
            return self.widths
        pieces, found = iter(divided[1].pieces), []
        for width in self.widths:
            whole = own = 0
            while whole < width:
                piece = next(pieces)
                whole, own = whole + piece.length, own + piece.each
            if whole != width:
                raise ValueError(f"{self.name}: its parts {self.widths} are not the pieces that ranks divide")
            found.append(own)
        return tuple(found)

    @property
    def names(self) -> set[str]:
        """By which `lora_target_modules` may name it."""
        modules = [module for part in self.parts for module in part.modules] + list(self.stacked)
        return {module.rpartition(".")[2] for module in modules} | ({"experts"} if self.experts else set())


def adapted_layer(plan: WeightPlan, name: str) -> AdaptedLinear | None:
    """How adapters find an entry of the plan: of the unit "embed" an embedding, stacked experts, or a linear layer."""
    entry = plan[name]
    find = adapted_linear if entry.expert_axis is None else adapted_experts
    found = (adapted_embedding if name.startswith("embed.") else find)(plan, name)
    return None if found is None else found._replace(division=entry.division)


def _whole(plan: WeightPlan, name: str) -> tuple[Expr, tuple[int, ...]]:
    """The expression that fills an entry's memory, and its shape, before ranks divided it."""
    entry = plan[name]
    owner = plan[entry.tie] if entry.tie else entry
    return (owner.expr if owner.undivided is None else owner.undivided), entry.whole_shape


def adapted_linear(plan: WeightPlan, name: str) -> AdaptedLinear | None:
    """How adapters find an entry of the plan; None for what is no matrix of whole rows of a checkpoint's modules."""
    expr, shape = _whole(plan, name)
    if len(shape) != 2:
        return None
    if (owner := plan[name].tie) and name.startswith("layers."):
        return _of_tied(plan, name, owner)
    if owner:  # PEFT knows it by a name of its own, though its numbers are another one's
        return AdaptedLinear(name, shape[1], (shape[0],), (AdapterPart((name.rpartition(".")[2],), 0, 0),))
    if (found_by_turns := _by_turns(expr)) is not None:
        part, turns = found_by_turns
        return AdaptedLinear(name, shape[1], (shape[0],), (part,), turns=turns)
    matrices = expr.parts if isinstance(expr, Concat) and expr.dim == 0 else (expr,)
    parts = [_part(matrix) for matrix in matrices]
    if any(part is None for part in parts):
        return None
    found = tuple(part for part in parts if part is not None)
    return AdaptedLinear(name, shape[1], tuple(matrix.shape[0] for matrix in matrices), found)


def _of_tied(plan: WeightPlan, name: str, owner: str) -> AdaptedLinear | None:
    """Of a layer whose weight is another layer's: its module is its own, and named as its layer is."""
    if (found := adapted_linear(plan, owner)) is None:
        return None
    first, own = (f".{entry.rpartition('.')[0]}." for entry in (owner, name))  # such as ".layers.5."
    parts = (p._replace(modules=tuple(m.replace(first, own, 1) for m in p.modules)) for p in found.parts)
    return found._replace(name=name, parts=tuple(parts))


def adapted_embedding(plan: WeightPlan, name: str) -> AdaptedLinear | None:
    """The same for a table of rows. One that a head is tied to may be stored as the head, but is not meant by it."""
    expr, shape = _whole(plan, name)
    part, heads = _part(expr), {e.name.rpartition(".")[2] for e in plan if e.tie == name}
    if part is None or part.stop:
        return None
    part = part._replace(modules=tuple(module for module in part.modules if module not in heads))
    return AdaptedLinear(name, shape[0], shape[1:], (part,), "embedding")


def adapted_experts(plan: WeightPlan, name: str) -> AdaptedLinear | None:
    """The same for stacked matrices of experts: of gates above ups, or a single one of each, an up or a down."""
    expr, shape = _whole(plan, name)
    if len(shape) != 3:
        return None
    N, outputs, inputs = shape
    if (parts := _of_each_expert(expr)) is not None:
        folders = [module.partition("{}")[0] for module in parts[0].modules]
        up = parts[0].modules[0].endswith(".up_proj")
        tensor = "gate_up_proj" if len(parts) > 1 else "up_proj" if up else "down_proj"
        # transformers 5 has one name for what checkpoints call in several ways.
        names = [n + tensor for folder in folders for n in (folder, folder.replace(".block_sparse_moe.", ".mlp."))]
        widths = (outputs // len(parts),) * len(parts)
        return AdaptedLinear(name, inputs, widths, parts, "experts", N, tuple(dict.fromkeys(names)))
    reads = [re.match(r".+\.experts\.(gate_up|down)_proj", e.sources[0]) for e in walk(expr) if isinstance(e, Read)]
    stacked = tuple(dict.fromkeys(found[0] for found in reads if found is not None))
    if len(stacked) != 1 or None in reads:
        return None
    matrices = 2 if stacked[0].endswith("gate_up_proj") else 1
    turns = (1, 1) if matrices > 1 and isinstance(expr, Reshape) and isinstance(expr.part, Permute) else ()
    parts, widths = (AdapterPart((), 0, 0),) * matrices, (outputs // matrices,) * matrices
    return AdaptedLinear(name, inputs, widths, parts, "experts", N, stacked, turns)


def linear_from(plain: list[Any]) -> AdaptedLinear:
    """What was written as JSON."""
    return msgspec.convert(plain, AdaptedLinear)


def _of_each_expert(expr: Expr) -> tuple[AdapterPart, ...] | None:
    """The parts of a stack in which every expert's matrices are modules of their own, named alike."""
    if not isinstance(expr, Stack):
        return None
    alike: set[tuple[AdapterPart, ...]] = set()
    for n, expert in enumerate(expr.parts):
        of_one = expert.parts if isinstance(expert, Concat) and expert.dim == 0 else (expert,)
        found = [part for part in map(_part, of_one) if part is not None and not part.stop]
        if len(found) != len(of_one) or any(f".experts.{n}." not in m for part in found for m in part.modules):
            return None
        named = ([m.replace(f".experts.{n}.", ".experts.{}.") for m in part.modules] for part in found)
        alike.add(tuple(AdapterPart(tuple(modules), 0, 0) for modules in named))
    return alike.pop() if len(alike) == 1 else None


def _by_turns(expr: Expr) -> tuple[AdapterPart, tuple[int, ...]] | None:
    """A module's matrix whose rows are stored by turns and read one kind after the other, and how many of each kind
    follow in a turn."""
    counts: list[int] = []
    matrices: set[tuple[Expr, int]] = set()
    for kind in expr.parts if isinstance(expr, Concat) and expr.dim == 0 else ():
        rows = kind.part if isinstance(kind, Reshape) else None
        turns = rows.part if isinstance(rows, Slice) and rows.dim == 1 and rows.start == sum(counts) else None
        if not isinstance(rows, Slice) or not isinstance(turns, Reshape) or len(turns.to) != 3:
            return None
        counts.append(rows.stop - rows.start)
        matrices.add((turns.part, turns.to[1]))
    if len(matrices) != 1:
        return None
    stored, count = matrices.pop()
    part = _part(stored)
    return None if part is None or part.stop or sum(counts) != count else (part, tuple(counts))


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
