"""Where the values of a lowered piece lie: each in the memory of a root, with an offset, sizes and strides. Views are
places only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from graphllm.compile.codegen.prebuilt.elements import ELEMENTS
from graphllm.compile.codegen.prebuilt.loop import Access
from graphllm.ir.graph import Shapes, TensorSpec
from graphllm.program.specs import Dim


class Place(NamedTuple):
    """A value in memory.

    root: the value that the memory was made for.
    offset: its first element's number there.
    """

    root: str
    offset: Dim
    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    dtype: str


class Places:
    """The places of all values so far.

    of: by node.
    made: by root, what its memory was made for; inputs of the piece have none.
    parts: by node with several results, their roots.
    """

    def __init__(self, graph: Graph, shapes: Shapes) -> None:
        self._shapes = shapes
        self._roots: dict[int, str] = {}  # by storage
        self.of: dict[Node, Place] = {}
        self.made: dict[str, TensorSpec] = {}
        self.parts: dict[Node, tuple[str, ...]] = {}
        self.within: dict[Node, tuple[Node, Dim]] = {}  # computed in its place of a concatenation
        for node in graph.nodes:
            if operator_name(node) == "aten::cat":
                self._find_parts(node)

    def dim(self, size: Any) -> Dim:
        """A size as an int or as text over T, S and R."""
        return self._shapes.dim(size)

    def spec(self, value: torch.Tensor) -> TensorSpec:
        """Of a value of the trace."""
        return self._shapes.spec(value)

    def add_input(self, node: Node, name: str) -> None:
        """An input of the piece."""
        self._roots[_storage(node.meta["val"])] = name
        self.of[node] = self.place_of(node.meta["val"])

    def is_view(self, value: torch.Tensor) -> bool:
        """Whether it lies in memory that there is."""
        return _storage(value) in self._roots

    def place_of(self, value: torch.Tensor) -> Place:
        """Of a value in memory that there is."""
        spec = self.spec(value)
        return Place(
            self._roots[_storage(value)], self.dim(value.storage_offset()), spec.shape, spec.stride, spec.dtype
        )

    def share(self, value: torch.Tensor, root: str) -> None:
        """The value's memory is that of ``root``."""
        self._roots[_storage(value)] = root

    def make(self, node: Node, value: torch.Tensor, root: str = "") -> Place:
        """Make memory for a result of a node, or take its place in a concatenation. root: if not the node."""
        root = root or node.name
        if node in self.within:
            whole, offset = self.within[node]
            around = self.make(whole, whole.meta["val"])
            spec = self.spec(value)
            return Place(around.root, offset, spec.shape, around.strides, spec.dtype)
        self.share(value, root)
        self.made.setdefault(root, self.spec(value))
        return self.place_of(value)

    def access(self, place: Place, rank: int) -> Access:
        """A value as a loop over ``rank`` dimensions, the inner one last, goes over it."""
        strides: list[Dim] = [0] * (rank - len(place.shape))
        strides += [0 if d == 1 else s for d, s in zip(place.shape, place.strides, strict=True)]
        return Access(place.root, place.dtype, place.offset, tuple(strides[:-1]), strides[-1] if strides else 0)

    def _find_parts(self, node: Node) -> None:
        """Operands of a concatenation that nobody else reads are computed in their places in it."""
        parts, axis = operands(node)[0], argument(node, 1, "dim", 0)
        whole, offset = node.meta["val"], 0
        for part in parts:
            value = part.meta["val"]
            alone = len(part.users) == 1 and parts.count(part) == 1 and operator_name(part) in ELEMENTS
            if alone and value.dtype == whole.dtype:
                self.within[part] = node, self.dim(offset * whole.stride()[axis])
            offset = offset + value.shape[axis]


def moved_last(place: Place, axis: int) -> Place:
    """The same value with dimension ``axis`` as the last."""
    order = [i for i in range(len(place.shape)) if i != axis] + [axis]
    return place._replace(shape=tuple(place.shape[i] for i in order), strides=tuple(place.strides[i] for i in order))


def operator_name(node: Node) -> str:
    """The operator that a node calls, such as aten::add, without its overload."""
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def operands(node: Node) -> Sequence[Any]:
    """The arguments of a node by position."""
    return node.args


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a node, by position or name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata
