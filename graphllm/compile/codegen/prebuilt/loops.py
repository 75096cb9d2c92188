"""Writing nodes into loops: element by element, row by row, by index, and side by side."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Node

from graphllm.compile.codegen.prebuilt.elements import (
    ELEMENTS,
    ROWS,
    Operands,
    Recipe,
    RowRecipe,
    best_of,
    converted,
    put,
    softmax,
)
from graphllm.compile.codegen.prebuilt.loop import Loop, Register, dtype_name, is_float
from graphllm.compile.codegen.prebuilt.places import Place, Places, argument, moved_last, operands, operator_name
from graphllm.compile.codegen.prebuilt.steps import Steps
from graphllm.program.specs import Dim

_SOFTMAX = ("aten::_softmax", "aten::softmax", "aten::_log_softmax", "aten::log_softmax")
_MOST = 16  # numbers of a row that loops choose
_GATHERS = ("aten::index", "aten::embedding", "aten::gather", "aten::index_select")


class Space(NamedTuple):
    """What a node goes over. rows: sizes of the outer dimensions. inner: size of the innermost."""

    rows: tuple[Dim, ...]
    inner: Dim

    @property
    def rank(self) -> int:
        """The number of all dimensions."""
        return len(self.rows) + 1


class LoopWriter:
    """Writes nodes into the loops of a piece, where their operators and dtypes allow that."""

    def __init__(self, places: Places, steps: Steps) -> None:
        self._places, self._steps = places, steps

    def write(self, node: Node) -> bool:
        """Write a node; False where torch must compute it."""
        value, name = node.meta["val"], operator_name(node)
        made = [value] if isinstance(value, torch.Tensor) else list(value)
        if not all(map(is_known, (*made, *(n.meta["val"] for n in _nodes(node))))):
            return False
        if name in ROWS:
            return self._reduce(node, ROWS[name])
        if name == "aten::topk":
            return self._choose_best(node)
        if name in _GATHERS:
            return self._gather(node, name)
        if name == "aten::cat":
            self._concatenate(node)
        elif name in ELEMENTS:
            self._write(node, ELEMENTS[name])
        elif name in _SOFTMAX and argument(node, 1, "dim") in (-1, value.dim() - 1):
            self._write(node, lambda o: softmax(o, "log" in name), sums=True)
        elif name == "aten::scatter" and _puts_one(node):
            self._write(node, put, sums=True)
        elif name in ("aten::arange", "prims::iota"):
            self._write(node, lambda o: _numbers(o, node, name))
        else:
            return False
        return True

    def _write(self, node: Node, recipe: Recipe, sums: bool = False) -> None:
        """Write a node into a loop over its own dimensions. sums: over the inner one, whatever its size."""
        space = _space(self._places.spec(node.meta["val"]).shape)
        accesses = [self._places.access(self._places.of[n], space.rank) for n in _nodes(node)]
        loop = self._steps.loop(space.rows, space.inner, accesses)
        if sums and loop.inner is None:
            loop.inner = space.inner
        found = recipe(_Operands(self._places, node, loop))
        self._keep(node, loop, found, self._places.make(node, node.meta["val"]))

    def _keep(
        self, node: Node, loop: Loop, found: Register, place: Place, seen: Place | None = None, part: bool = False
    ) -> None:
        """Store a result. seen: its place as the loop goes over it. part: one of several."""
        if not part:
            self._places.of[node] = place
        found = loop.as_floats(found) if is_float(place.dtype) else loop.as_integers(found)
        access = self._places.access(seen or place, len(loop.rows) + 1)
        loop.store(access, found)
        loop.held[access] = found
        self._steps.wrote(loop, access.root)

    def _made(self, node: Node) -> list[Place]:
        """Memory for all results of a node."""
        value, places = node.meta["val"], self._places
        if isinstance(value, torch.Tensor):
            return [places.make(node, value)]
        names = places.parts[node] = tuple(f"{node.name}_{i}" for i in range(len(value)))
        return [places.make(node, one, name) for one, name in zip(value, names, strict=True)]

    def _row_loop(self, source: Node, axis: int) -> tuple[Loop, Place]:
        """A loop whose inner dimension is ``axis`` of an operand, and the operand as it goes over it."""
        places = self._places
        shape = places.spec(source.meta["val"]).shape
        rows, turned = (*shape[:axis], *shape[axis + 1 :]), moved_last(places.of[source], axis)
        loop = self._steps.loop(rows, shape[axis], [places.access(turned, len(rows) + 1)])
        if loop.inner is None:  # of size 1
            loop.inner = shape[axis]
        return loop, turned

    def _reduce(self, node: Node, recipe: RowRecipe) -> bool:
        """One number for each row along a dimension, wherever that lies."""
        source = operands(node)[0]
        value, given = source.meta["val"], argument(node, 1, "dim")
        axes = list(range(value.dim())) if given in (None, []) else [given] if isinstance(given, int) else list(given)
        if len(axes) != 1:
            return False
        axis = axes[0] % value.dim()
        loop, turned = self._row_loop(source, axis)
        found, made = recipe(_Operands(self._places, node, loop, {source: turned}), source), self._made(node)
        for register, place in zip(found, made, strict=True):
            if len(place.shape) == value.dim():
                seen = moved_last(place, axis)
            else:
                seen = place._replace(shape=(*place.shape, 1), strides=(*place.strides, 0))
            self._keep(node, loop, register, place, seen, part=len(made) > 1)
        return True

    def _choose_best(self, node: Node) -> bool:
        """The largest few numbers of each row, in order."""
        source, count = operands(node)[:2]
        last, largest = source.meta["val"].dim() - 1, argument(node, 3, "largest", True)
        if argument(node, 2, "dim", -1) not in (-1, last) or not largest or not isinstance(count, int) or count > _MOST:
            return False
        loop, turned = self._row_loop(source, last)
        values, numbers = self._made(node)
        for i, pair in enumerate(best_of(_Operands(self._places, node, loop, {source: turned}), source, count)):
            for register, place in zip(pair, (values, numbers), strict=True):
                one = place._replace(shape=(*place.shape[:-1], 1), offset=i)  # both are new and dense
                self._keep(node, loop, register, place, one, part=True)
        return True

    def _gather(self, node: Node, name: str) -> bool:
        """Elements by index: offsets of all indices together, from where the other dimensions say."""
        places, value = self._places, node.meta["val"]
        found = _indices(node, name)
        if found is None:
            return False
        table, axes = found
        place, shape, first = places.of[table], places.spec(value).shape, min(axes)
        seen = {index: places.of[index] for index in axes.values()}
        if name == "aten::gather":
            strides = [0 if i in axes else s for i, s in enumerate(place.strides)]
        else:
            wide = max(index.meta["val"].dim() for index in axes.values())
            before, after = place.strides[:first], place.strides[first + len(axes) :]
            strides = [*before, *[0] * wide, *after]
            for index, own in seen.items():
                ones, zeros = [1] * len(after), [0] * len(after)
                seen[index] = own._replace(shape=(*own.shape, *ones), strides=(*own.strides, *zeros))
        space = _space(shape)
        accesses = {index: places.access(own, space.rank) for index, own in seen.items()}
        loop = self._steps.loop(space.rows, space.inner, accesses.values(), {place.root})
        total: Register | None = None
        for axis, index in axes.items():
            at = loop.as_integers(loop.load(accesses[index]))
            negative = loop.emit("IntLt", False, at, loop.constant(0, False))
            at = loop.emit(
                "IntChoose", False, negative, loop.emit("IntAdd", False, at, loop.size(place.shape[axis])), at
            )
            stride = place.strides[axis]
            at = at if stride == 1 else loop.emit("IntMul", False, at, loop.size(stride))
            total = at if total is None else loop.emit("IntAdd", False, total, at)
        assert total is not None
        around = Place(place.root, place.offset, shape, tuple(strides), place.dtype)
        taken = loop.gather(places.access(around, space.rank), total)
        self._keep(node, loop, taken, places.make(node, value))
        return True

    def _concatenate(self, node: Node) -> None:
        """Copy the operands that were not computed in their places."""
        places, whole = self._places, node.meta["val"]
        axis = argument(node, 1, "dim", 0) % whole.dim()
        places.of[node] = made = places.make(node, whole)
        offset: Any = 0
        for part in operands(node)[0]:
            value = part.meta["val"]
            start, offset = offset, offset + value.shape[axis]
            if part in places.within or value.numel() == 0:
                continue
            space = _space(places.spec(value).shape)
            place = made._replace(offset=places.dim(start * whole.stride()[axis]), shape=places.spec(value).shape)
            loop = self._steps.loop(space.rows, space.inner, [places.access(places.of[part], space.rank)])
            found = converted(_Operands(places, node, loop), part, whole.dtype)
            loop.store(places.access(place, space.rank), found)
            self._steps.wrote(loop, made.root)


class _Operands:
    """See `elements.Operands`. seen: places of operands that the loop reads in another way than they lie."""

    def __init__(self, places: Places, node: Node, loop: Loop, seen: dict[Node, Place] | None = None) -> None:
        value = node.meta["val"]
        self.loop, self.made = loop, (value if isinstance(value, torch.Tensor) else value[0]).dtype
        self._places, self._node, self._seen = places, node, seen or {}

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        return argument(self._node, position, name, default)

    def register(self, value: Any, floats: bool | None = None) -> Register:
        loop = self.loop
        if not isinstance(value, Node):
            register = loop.constant(value, isinstance(value, float) if floats is None else floats)
        elif isinstance(value.meta["val"], torch.Tensor):
            place = self._seen.get(value) or self._places.of[value]
            register = loop.load(self._places.access(place, len(loop.rows) + 1))
        else:
            register = loop.size(self._places.dim(value.meta["val"]))
        if floats is None:
            return register
        return loop.as_floats(register) if floats else loop.as_integers(register)

    def floats(self, value: Any) -> bool:
        if isinstance(value, Node):
            found = value.meta["val"]
            return isinstance(found, torch.Tensor) and found.dtype.is_floating_point
        return isinstance(value, float)


def _numbers(o: Operands, node: Node, name: str) -> Register:
    """Numbers in order."""
    given, floats = list(operands(node)), o.made.is_floating_point
    if name == "prims::iota":
        start, step = node.kwargs["start"], node.kwargs["step"]
    else:
        start = given[0] if len(given) > 1 else 0
        step = given[2] if len(given) > 2 else 1
    prefix, found = "" if floats else "Int", o.loop.place(o.loop.inner is not None, None)
    found = o.loop.as_floats(found) if floats else found
    if step != 1:
        found = o.loop.emit(prefix + "Mul", floats, found, o.register(step, floats))
    return found if start == 0 else o.loop.emit(prefix + "Add", floats, found, o.register(start, floats))


def _indices(node: Node, name: str) -> tuple[Node, dict[int, Node]] | None:
    """The table that a node takes elements of, and its indices by dimension. None for masks, and where other dimensions
    are between those."""
    given = operands(node)
    if name == "aten::embedding":
        return given[0], {0: given[1]}
    if name != "aten::index":
        return given[0], {given[1] % given[0].meta["val"].dim(): given[2]}
    axes = {i: index for i, index in enumerate(given[1]) if index is not None}
    masks = any(index.meta["val"].dtype in (torch.bool, torch.uint8) for index in axes.values())
    return None if masks or max(axes) - min(axes) + 1 != len(axes) else (given[0], axes)


def _puts_one(node: Node) -> bool:
    """Whether a node writes one number into each row."""
    table, axis, index, value = operands(node)
    last = table.meta["val"].dim() - 1
    return not isinstance(value, Node) and axis in (-1, last) and index.meta["val"].shape[-1] == 1


def _space(shape: tuple[Dim, ...]) -> Space:
    return Space(tuple(shape[:-1]), shape[-1]) if shape else Space((), 1)


def _nodes(node: Node) -> list[Node]:
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]


def is_known(value: torch.Tensor) -> bool:
    """Whether loops have its element type and so many dimensions."""
    return dtype_name(value.dtype) is not None and value.dim() <= 6
