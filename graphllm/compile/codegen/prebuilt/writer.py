"""A lowered piece as calls of prebuilt kernels: of ops, and of the loops that do all between them.

Nodes become steps in the order of the graph. Memory is made for results that somebody reads from memory; what only the
loop reads that made it stays in registers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from graphllm.compile.codegen.lower import Lowered
from graphllm.compile.codegen.prebuilt.calls import Calls, names_in
from graphllm.compile.codegen.prebuilt.elements import (
    ELEMENTS,
    REDUCTIONS,
    Operands,
    Recipe,
    converted,
    reduced,
    softmax,
)
from graphllm.compile.codegen.prebuilt.loop import Loop, Register, dtype_name, is_float, reads, written
from graphllm.compile.codegen.prebuilt.places import Place, Places, argument, moved_last, operands, operator_name
from graphllm.compile.codegen.prebuilt.program import KERNEL, encoded
from graphllm.compile.codegen.prebuilt.steps import Steps
from graphllm.compile.codegen.translate import Bundle, TranslateError
from graphllm.program.specs import Dim

_EMPTY = ("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided")
_SOFTMAX = ("aten::_softmax", "aten::softmax", "aten::_log_softmax", "aten::log_softmax")
_GATHERS = ("aten::index", "aten::embedding", "aten::gather", "aten::index_select")


class Space(NamedTuple):
    """What a node goes over. rows: sizes of the outer dimensions. inner: size of the innermost."""

    rows: tuple[Dim, ...]
    inner: Dim

    @property
    def rank(self) -> int:
        """The number of all dimensions."""
        return len(self.rows) + 1


def bundle_of(lowered: Lowered) -> Bundle:
    """A lowered piece in the piece format. Raises TranslateError for what it cannot say."""
    return _Writer(lowered).run()


class _Writer:
    def __init__(self, lowered: Lowered) -> None:
        self._graph = lowered.graph.graph
        self._places, self._steps = Places(self._graph, lowered.shapes), Steps()
        self._calls = Calls(self._places, self._steps)

    def run(self) -> Bundle:
        inputs: list[str] = []
        for node in self._graph.nodes:
            if node.op == "placeholder":
                inputs.append(f"p{len(inputs)}")
                self._places.add_input(node, inputs[-1])
            elif node.op == "call_function":
                self._node(node)
            elif node.op == "get_attr":
                raise TranslateError(f"{node.target}: a piece holds a constant tensor")
        (output,) = self._graph.find_nodes(op="output")
        self._steps.close()
        return self._bundle(inputs, [self._calls.named(value) for value in output.args[0]])

    def _node(self, node: Node) -> None:
        value, name, places = node.meta.get("val"), operator_name(node), self._places
        if isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)):
            return
        if node.target is operator.getitem and operands(node)[0] in places.parts:
            of, number = operands(node)
            places.share(node.meta["val"], places.parts[of][number])
            places.of[node] = places.place_of(node.meta["val"])
        elif isinstance(value, torch.Tensor) and name in _EMPTY:
            places.of[node] = places.make(node, value)
        elif isinstance(value, torch.Tensor) and places.is_view(value) and not name.endswith("_"):
            places.of[node] = places.place_of(value)
        elif isinstance(value, (list, tuple)) and all(isinstance(v, torch.Tensor) and places.is_view(v) for v in value):
            return  # its parts are views
        elif not self._calls.kernel(node) and not self._element_wise(node, name):
            self._calls.torch(node)

    def _element_wise(self, node: Node, name: str) -> bool:
        """Write a node into a loop, where its operator and dtypes allow that."""
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor) or not all(map(_is_known, (value, *_tensors(node)))):
            return False
        if name in ELEMENTS:
            self._write(node, ELEMENTS[name])
        elif name in REDUCTIONS:
            return self._reduce(node, REDUCTIONS[name])
        elif name in _SOFTMAX and argument(node, 1, "dim") in (-1, value.dim() - 1):
            self._write(node, lambda o: softmax(o, "log" in name), sums=True)
        elif name in _GATHERS:
            return self._gather(node, name)
        elif name == "aten::cat":
            self._concatenate(node)
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

    def _keep(self, node: Node, loop: Loop, found: Register, place: Place, seen: Place | None = None) -> None:
        """Store a result. seen: its place as the loop goes over it."""
        self._places.of[node] = place
        found = loop.as_floats(found) if is_float(place.dtype) else loop.as_integers(found)
        access = self._places.access(seen or place, len(loop.rows) + 1)
        loop.store(access, found)
        loop.held[access] = found
        self._steps.wrote(loop, access.root)

    def _reduce(self, node: Node, code: str) -> bool:
        """A sum over one dimension: the loop's inner one, wherever it lies."""
        source, places = operands(node)[0], self._places
        value, given = source.meta["val"], argument(node, 1, "dim")
        axes = list(range(value.dim())) if given in (None, []) else [given] if isinstance(given, int) else list(given)
        if len(axes) != 1:
            return False
        axis = axes[0] % value.dim()
        shape = places.spec(value).shape
        rows = (*shape[:axis], *shape[axis + 1 :])
        turned = moved_last(places.of[source], axis)
        loop = self._steps.loop(rows, shape[axis], [places.access(turned, len(rows) + 1)])
        if loop.inner is None:  # of size 1
            loop.inner = shape[axis]
        found = reduced(_Operands(places, node, loop, {source: turned}), code, source)
        made = places.make(node, node.meta["val"])
        if len(made.shape) == len(rows):
            seen = made._replace(shape=(*made.shape, 1), strides=(*made.strides, 0))
        else:
            seen = moved_last(made, axis)
        self._keep(node, loop, found, made, seen)
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

    def _bundle(self, inputs: list[str], outputs: list[str]) -> Bundle:
        """Loops become programs when all is known: what nobody reads is not stored."""
        made, needed = self._places.made, set(outputs)
        for step in self._steps.all:
            needed.update(a.root for a in reads(step)) if isinstance(step, Loop) else needed.update(names_in(step))
        code: list[list[Any]] = []
        kernels = dict(self._calls.kernels)
        there = set(inputs)

        def make(roots: Iterable[str]) -> None:
            for root in roots:
                if root in made and root not in there:
                    there.add(root)
                    spec = made[root]
                    code.append(["empty", root, list(spec.shape), list(spec.stride), spec.dtype])

        for step in self._steps.all:
            if not isinstance(step, Loop):
                make(names_in(step))
                code.append(step)
                continue
            loop = written(step, lambda root: root in needed or root not in made)
            if not loop.steps:
                continue
            program = encoded(loop)
            make(program.roots)
            name = f"{KERNEL}_{len(kernels)}"
            kinds = ["ptr"] * (1 + len(program.roots)) + ["i64"] * len(program.sizes)
            kernels[name] = {"args": kinds, "c": KERNEL, "program": program.words}
            arguments = [None, *(["t", r] for r in program.roots), *(["i", s] for s in program.sizes)]
            code.append(["kernel", name, arguments])
        make(outputs)
        return Bundle(inputs, outputs, code, kernels)


class _Operands:
    """See `elements.Operands`. seen: places of operands that the loop reads in another way than they lie."""

    def __init__(self, places: Places, node: Node, loop: Loop, seen: dict[Node, Place] | None = None) -> None:
        self.loop, self.made = loop, node.meta["val"].dtype
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


def _space(shape: tuple[Dim, ...]) -> Space:
    return Space(tuple(shape[:-1]), shape[-1]) if shape else Space((), 1)


def _nodes(node: Node) -> list[Node]:
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]


def _tensors(node: Node) -> list[torch.Tensor]:
    return [n.meta["val"] for n in _nodes(node)]


def _is_known(value: torch.Tensor) -> bool:
    return dtype_name(value.dtype) is not None and value.dim() <= 6
