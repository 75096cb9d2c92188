"""The IR graph: an FX graph of ``graphllm::`` ops and aten shape work, with its verifier.

Dimensions are ints or expressions over the symbols T (tokens), S (sequences) and R (sampled rows).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from graphllm.config import Bucket, ConfigError
from graphllm.ir.op import NAMESPACE, all_ops, op_of
from graphllm.program.expr import parse
from graphllm.program.specs import Dim

_PYTHON_OPERATORS: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem, "add": operator.add, "sub": operator.sub, "mul": operator.mul,
    "floordiv": operator.floordiv, "mod": operator.mod, "neg": operator.neg,
}  # fmt: skip


class GraphError(Exception):
    """The IR is not well formed; the message names the node and the rule."""


@dataclass(frozen=True)
class TensorSpec:
    """What the compiler knows of a tensor: dtype name ("bfloat16"), dimensions and strides in elements."""

    dtype: str
    shape: tuple[Dim, ...]
    stride: tuple[Dim, ...]

    @staticmethod
    def contiguous(dtype: str, *shape: Dim) -> TensorSpec:
        """Row-major strides."""
        stride: list[Dim] = [1]
        for d in shape[:0:-1]:
            inner = stride[-1]
            stride.append(
                d * inner if isinstance(d, int) and isinstance(inner, int) else d if inner == 1 else f"{d}*{inner}"
            )
        return TensorSpec(dtype, shape, tuple(reversed(stride)) if shape else ())

    def __str__(self) -> str:
        dense = "" if _is_contiguous(self) else f" strides {list(self.stride)}"
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]{dense}"


def _is_contiguous(spec: TensorSpec) -> bool:
    expected: Dim = 1
    for d, s in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if s != expected and d != 1:
            return False
        expected = d * expected if isinstance(d, int) and isinstance(expected, int) else f"{d}*{expected}"
    return True


class Shapes:
    """The symbols of one trace: a fake-tensor mode in which T, S and R are given ints or symbolic with a size hint."""

    def __init__(self, device: str, bucket: Bucket | None = None) -> None:
        self.device = torch.device(device)
        self.mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        self._named: dict[tuple[str, TensorSpec], torch.Tensor] = {}
        if bucket and bucket.kind == "decode":
            q = bucket.query_len
            S: Any = bucket.lo if bucket.static else self._symbol(bucket.hi)
            # Not as q * S: a piece may have inputs of that size and none of S, which the size could not be read from.
            T = S if q == 1 else q * bucket.lo if bucket.static else self._symbol(q * bucket.hi)
            self.symbols = {"T": T, "S": S, "R": T}
        elif bucket and bucket.static:
            few = 1 if bucket.lo == 1 else 0
            self.symbols = {"T": bucket.lo, "S": few or self._symbol(3), "R": few or self._symbol(3)}
        else:
            hint = bucket.hi if bucket else 37
            self.symbols = {"T": self._symbol(hint), "S": self._symbol(min(hint, 5)), "R": self._symbol(min(hint, 3))}
        # Where sizes are equal, the first of them names them all.
        named = {n: str(v.node.expr) for n, v in self.symbols.items() if isinstance(v, torch.SymInt)}
        self.names = {symbol: n for n, symbol in reversed(named.items())}

    def _symbol(self, hint: int) -> torch.SymInt:
        context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        probe = self.mode.from_tensor(torch.empty(max(hint, 2), device="meta"), symbolic_context=context)
        return probe.shape[0]  # type: ignore[return-value]

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """A fake tensor of that spec."""
        with self.mode:
            return torch.empty_strided(
                [self._value(d) for d in spec.shape],
                [self._value(d) for d in spec.stride],
                dtype=getattr(torch, spec.dtype),
                device=self.device,
            )

    def named(self, name: str, spec: TensorSpec) -> torch.Tensor:
        """The fake tensor that stands for a value of that name and spec in every unit of this trace."""
        if (name, spec) not in self._named:
            self._named[name, spec] = self.tensor(spec)
        return self._named[name, spec]

    def spec(self, value: torch.Tensor) -> TensorSpec:
        """The spec of a fake tensor of this trace."""
        return TensorSpec(
            str(value.dtype).removeprefix("torch."),
            tuple(self.dim(d) for d in value.shape),
            tuple(self.dim(d) for d in value.stride()),
        )

    def dim(self, value: int | torch.SymInt) -> Dim:
        """A size as an int or as text over T, S and R."""
        if isinstance(value, int):
            return value
        return self.rename(str(value.node.expr))

    def rename(self, text: str) -> str:
        """Text with the trace's own symbol names replaced by T, S and R."""
        for symbol, name in self.names.items():
            text = _replace_name(text, symbol, name)
        return text

    def fixed(self) -> str:
        """The symbols that tracing took for numbers, "T = 16", or an empty text: such code serves one size only."""
        names = {n: v.node.expr for n, v in self.symbols.items() if isinstance(v, torch.SymInt)}
        return ", ".join(f"{n} = {expr}" for n, expr in names.items() if expr.is_number)

    def _value(self, dim: Dim) -> Any:
        return dim if isinstance(dim, int) else evaluate(dim, self.symbols)


def _replace_name(text: str, old: str, new: str) -> str:
    return re.sub(rf"\b{re.escape(old)}\b", new, text)


def evaluate(text: str, values: Mapping[str, Any]) -> Any:
    """The value of an integer expression of + - * // % over named values."""
    return parse(text)(values)


def target_name(target: Any) -> str:
    """The printed name of a node's target: ``graphllm::linear``, ``aten::view.default`` or a Python operator."""
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name
        return name if target.namespace == NAMESPACE else f"{name}.{target._overloadname}"
    for name, function in _PYTHON_OPERATORS.items():
        if target is function:
            return name
    raise GraphError(f"{target!r} is no IR target; only graphllm ops, aten ops and integer arithmetic are")


def target_of(name: str) -> Callable[..., Any]:
    """The callable that a printed name stands for. Raises ConfigError for an unknown op."""
    if name in _PYTHON_OPERATORS:
        return _PYTHON_OPERATORS[name]
    namespace, rest = name.split("::")
    if namespace == NAMESPACE:
        if rest not in all_ops():
            raise ConfigError(
                f"the graph uses the op {rest!r}, which is not registered here; install its plugin, or compile the "
                "artifact again if an earlier version has made it"
            )
        return all_ops()[rest].overload
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


def verify(graph: torch.fx.Graph, where: str) -> None:
    """Raise GraphError unless every node is an IR node used after its definition and every value has a fake tensor."""
    try:
        graph.lint()
    except RuntimeError as problem:
        raise GraphError(f"{where}: {problem}") from problem
    for node in graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise GraphError(f"{where}: node {node.name} is a {node.op}; only calls of registered ops are allowed")
        if node.op == "call_function":
            try:
                target_name(node.target)
            except GraphError as problem:
                raise GraphError(f"{where}: node {node.name}: {problem}") from problem
            op = op_of(node.target)
            if op is not None:
                for name in op.mutates:
                    written = op.bind(node.args, node.kwargs)[name]
                    if written.op != "placeholder":
                        raise GraphError(f"{where}: {node.name} writes {written.name}, which is not an input")
        if node.op != "output" and "val" not in node.meta:
            raise GraphError(f"{where}: node {node.name} has no fake value; a pass must set meta['val']")


def eliminate_dead(graph: torch.fx.Graph, keep_inputs: bool = False) -> int:
    """Remove nodes without users that write nothing, and inputs nobody reads; the number removed."""
    removed = 0
    for node in reversed(list(graph.nodes)):
        if node.users or node.op == "output" or (node.op == "placeholder" and keep_inputs):
            continue
        op = op_of(node.target)
        schema = getattr(node.target, "_schema", None)
        if (op is not None and (op.mutates or op.collective)) or (schema is not None and schema.is_mutable):
            continue
        graph.erase_node(node)
        removed += 1
    return removed


def copy_nodes(
    nodes: Iterable[torch.fx.Node], into: torch.fx.Graph, env: dict[torch.fx.Node, torch.fx.Node]
) -> Sequence[torch.fx.Node]:
    """Copy call nodes into another graph, reading inputs from ``env`` and recording the copies there."""
    made = []
    for node in nodes:
        copied = into.node_copy(node, lambda n: env[n])
        env[node] = copied
        made.append(copied)
    return made
