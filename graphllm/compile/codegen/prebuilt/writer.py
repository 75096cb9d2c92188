"""A lowered piece as calls of prebuilt kernels: of ops, and of the loops that do all between them.

Nodes become steps in the order of the graph. Memory is made for results that somebody reads from memory; what only the
loop reads that made it stays in registers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from graphllm.compile.codegen.lower import Lowered
from graphllm.compile.codegen.prebuilt.calls import Calls, names_in
from graphllm.compile.codegen.prebuilt.loop import Loop, reads, written
from graphllm.compile.codegen.prebuilt.loops import LoopWriter
from graphllm.compile.codegen.prebuilt.places import Places, operands, operator_name
from graphllm.compile.codegen.prebuilt.program import KERNEL, encoded
from graphllm.compile.codegen.prebuilt.steps import Steps
from graphllm.compile.codegen.translate import Bundle, TranslateError

_EMPTY = ("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided")


def bundle_of(lowered: Lowered) -> Bundle:
    """A lowered piece in the piece format. Raises TranslateError for what it cannot say."""
    return _Writer(lowered).run()


class _Writer:
    def __init__(self, lowered: Lowered) -> None:
        self._graph = lowered.graph.graph
        self._places, self._steps = Places(self._graph, lowered.shapes), Steps()
        self._calls, self._loops = Calls(self._places, self._steps), LoopWriter(self._places, self._steps)

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
        elif (
            isinstance(value, torch.Tensor) and places.is_view(value) and not name.endswith("_") and name != "aten::cat"
        ):
            places.of[node] = places.place_of(value)
        elif isinstance(value, (list, tuple)) and all(isinstance(v, torch.Tensor) and places.is_view(v) for v in value):
            return  # its parts are views
        elif not self._calls.kernel(node) and not self._loops.write(node):
            self._calls.torch(node)

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
