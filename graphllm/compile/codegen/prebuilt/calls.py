"""Calls between loops: of ops' own kernels, and of torch for what neither loops nor kernels know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from graphllm.compile.codegen.prebuilt.places import Places, operands, operator_name
from graphllm.compile.codegen.prebuilt.steps import Steps
from graphllm.ir.externs import EXTERN_NAMESPACE
from graphllm.ir.kernels import C_NAMESPACE, c_kernel
from graphllm.program.specs import Dim

_PRODUCTS = {"aten::mm": "aten::mm.out", "aten::bmm": "aten::bmm.out", "aten::addmm": "aten::addmm.out",
             "aten::baddbmm": "aten::baddbmm.out"}  # fmt: skip


class Calls:
    """Writes instructions. kernels: of ops that are called, by name, as the piece format describes them."""

    def __init__(self, places: Places, steps: Steps) -> None:
        self._places, self._steps = places, steps
        self._views = 0
        self.kernels: dict[str, dict[str, Any]] = {}

    def named(self, node: Node) -> str:
        """The name of a value for instructions: of its memory, or of a view of it."""
        place = self._places.of[node]
        made = self._places.made.get(place.root)
        whole = made is None or (made.shape, made.stride, made.dtype) == (place.shape, place.strides, place.dtype)
        if whole and place.offset == 0 and (made is not None or node.op == "placeholder"):
            return place.root
        self._views += 1
        name = f"view{self._views}"
        self._steps.add(["view", name, place.root, list(place.shape), list(place.strides), place.offset])
        return name

    def kernel(self, node: Node) -> bool:
        """A call of an op's own kernel, where the node is one."""
        name = operator_name(node)
        if name.startswith(f"{EXTERN_NAMESPACE}::"):
            given = [self._plain(a) for a in operands(node)]
            arguments = [[*next(iter(v.items()))] if isinstance(v, dict) else v for v in given]
            self._steps.add(["extern", name.removeprefix(f"{EXTERN_NAMESPACE}::"), arguments])
            return True
        if not name.startswith(f"{C_NAMESPACE}::"):
            return False
        symbol = name.removeprefix(f"{C_NAMESPACE}::")
        if symbol == "zeroed":
            value = node.meta["val"]
            self._places.share(value, node.name)
            self._places.of[node] = self._places.place_of(value)
            self._steps.add(["zeroed", node.name, self._places.dim(value.shape[0])])
            return True
        types = c_kernel(symbol).argument_types
        kinds = ["ptr" if "Tensor" in t else "f64" if t == "float" else "i64" for t in types]
        arguments = [self._argument(kind, given) for kind, given in zip(kinds, operands(node), strict=True)]
        self.kernels[symbol] = {"args": kinds, "c": symbol}
        self._steps.add(["kernel", symbol, arguments])
        return True

    def _argument(self, kind: str, given: Any) -> Any:
        if kind == "ptr":
            return None if given is None else ["t", self.named(given)]
        return float(given) if kind == "f64" else ["i", self._integer(given)]

    def _integer(self, value: Any) -> Dim:
        return self._places.dim(value.meta["val"]) if isinstance(value, Node) else int(value)

    def torch(self, node: Node) -> None:
        """A call of torch, which allocates its results; they are copied to memory of the plan."""
        places, steps, value, name = self._places, self._steps, node.meta["val"], operator_name(node)
        assert isinstance(node.target, torch._ops.OpOverload)
        overload = node.target._overloadname
        target = name if overload == "default" else f"{name}.{overload}"
        args = [self._plain(a) for a in operands(node)]
        kwargs = {k: p for k, v in node.kwargs.items() if (p := self._plain(v)) is not None}
        if name.endswith("_"):  # in place
            changed = operands(node)[0]
            places.of[node] = places.of[changed]
            steps.add(["call", [self.named(changed)], target, args, kwargs])
            return
        if isinstance(value, torch.Tensor):
            places.of[node] = places.make(node, value)
            if name in _PRODUCTS and places.of[node].root == node.name:
                steps.add(["op", _PRODUCTS[name], args, {**kwargs, "out": {"t": node.name}}])
            else:
                steps.add(["call", [self.named(node)], target, args, kwargs])
            return
        made = places.parts[node] = tuple(f"{node.name}_{i}" for i in range(len(value)))
        for one, root in zip(value, made, strict=True):
            places.make(node, one, root)
        steps.add(["call", list(made), target, args, kwargs])

    def _plain(self, value: Any) -> Any:
        """An argument of a torch operator: see `translate.plain` for the encoding."""
        if isinstance(value, Node):
            found = value.meta["val"]
            return {"t": self.named(value)} if isinstance(found, torch.Tensor) else {"i": self._places.dim(found)}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, (list, tuple)):
            return [self._plain(v) for v in value]
        if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
            return None
        if isinstance(value, float) and not abs(value) < float("inf"):
            return {"f": str(value)}
        return value


def names_in(instruction: Sequence[Any]) -> list[str]:
    """The values that an instruction reads or writes, apart from views that it makes."""
    found: list[str] = []

    def deep(item: Any) -> None:
        if isinstance(item, dict):
            found.extend([item["t"]] if "t" in item else [])
        elif isinstance(item, list):
            if len(item) == 2 and item[0] == "t":
                found.append(item[1])
            for inner in item:
                deep(inner)

    kind, *rest = instruction
    if kind == "view":
        return [rest[1]]
    if kind == "zeroed":
        return []
    if kind == "call":
        found += rest[0]
        rest = rest[1:]
    deep(rest)
    return found
