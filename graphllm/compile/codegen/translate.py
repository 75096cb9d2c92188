"""Take generated wrapper source apart: straight-line Python in, a list of plain instructions out.

Inductor's wrapper for one piece allocates buffers, calls kernels and returns. Each statement becomes one instruction
of the piece format (docs/artifact.md); a statement this file does not know is an error at compile time, never a
surprise later. Allocation is left to the linker of the program, so frees and reuse hints are dropped.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import re
from dataclasses import dataclass, field
from typing import Any

import torch

from graphllm.ir.exchange import EXCHANGE_WORDS
from graphllm.ir.externs import EXTERN_NAMESPACE
from graphllm.ir.gluon import GLUON_NAMESPACE, gluon_kernel
from graphllm.ir.graph import Shapes, TensorSpec, evaluate, target_of
from graphllm.ir.kernels import C_NAMESPACE, c_kernel
from graphllm.ir.triton import TRITON_NAMESPACE, TritonCall, changing

_IGNORED_CALLS = {"assert_size_stride", "assert_alignment", "args.clear", "torch.cuda.set_device", "set_device"}
_EXTERN = {
    "mm": "aten::mm.out", "addmm": "aten::addmm.out", "bmm": "aten::bmm.out", "baddbmm": "aten::baddbmm.out",
    "bias_addmm": "aten::addmm.out",
}  # fmt: skip


class TranslateError(Exception):
    """The generated source holds something the piece format cannot say. The message quotes it."""


@dataclass
class Bundle:
    """A compiled piece before packaging.

    inputs, outputs: value names.
    code: instructions in order.
    kernels: by name, the ABI ("args" as "ptr", "i64", "f64") and where the code is: "cpp" source text, "c" symbol of a
    `CKernel`, "generated" source of a Triton kernel that Inductor wrote, "call" of a Triton kernel of ours or "gluon"
    name of a `GluonKernel`, with what they are built from (`graphllm.compile.codegen.cubins`).
    """

    inputs: list[str]
    outputs: list[str] = field(default_factory=list)
    code: list[list[Any]] = field(default_factory=list)
    kernels: dict[str, dict[str, Any]] = field(default_factory=dict)


def translate(source: str, inputs: list[torch.Tensor], shapes: Shapes) -> Bundle:
    """The bundle of one generated module. ``inputs`` are the fake inputs in placeholder order."""
    tree = ast.parse(source)
    call = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "call")
    kernels = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).startswith("async_compile.")
    }
    return _Translator(kernels, inputs, shapes).run(call.body)


class _Translator:
    def __init__(self, kernels: dict[str, ast.Call], inputs: list[torch.Tensor], shapes: Shapes) -> None:
        self.definitions, self.inputs, self.shapes = kernels, inputs, shapes
        self.bundle = Bundle([])
        self.specs: dict[str, TensorSpec] = {}
        self.ints: dict[str, str] = {}
        self.groups: dict[str, list[str]] = {}
        self.sizes: list[str] = []
        self.count = 0

    def run(self, body: list[ast.stmt]) -> Bundle:
        for statement in body:
            self.statement(statement)
        return self.bundle

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.With):
            for inner in node.body:
                self.statement(inner)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            names = [ast.unparse(t) for t in node.targets[0].elts]
            # After the tensors come sizes; `Shapes.names` already knows their names.
            self.bundle.inputs, self.sizes = names[: len(self.inputs)], names[len(self.inputs) :]
            self.specs = {n: self.shapes.spec(t) for n, t in zip(self.bundle.inputs, self.inputs, strict=True)}
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            self.assign(node.targets[0].id, node.value)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            self.call(node.value, None)
        elif isinstance(node, ast.Return) and isinstance(node.value, (ast.Tuple, ast.List)):
            self.bundle.outputs = [self.tensor(e) for e in node.value.elts]
        elif not isinstance(node, (ast.Delete, ast.Pass)):
            raise TranslateError(f"unknown statement in generated source: {ast.unparse(node)}")

    def assign(self, name: str, value: ast.expr) -> None:
        text = ast.unparse(value)
        if text.endswith((".size()", ".stride()")) or "get_raw_stream" in text or text in self.sizes:
            return
        if isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name):
            base = value.value.id
            if base in self.groups:
                index = ast.literal_eval(value.slice)
                self.same(name, self.groups[base][index])
                return
            if base.endswith(("_size", "_stride")):
                return  # binds a shape symbol, which `Shapes.names` already knows
        if isinstance(value, ast.Name) and value.id in self.specs:
            self.same(name, value.id)
        elif isinstance(value, ast.Name) and value.id in self.groups:
            self.groups[name] = self.groups[value.id]
        elif isinstance(value, ast.Call):
            self.call(value, name)
        elif isinstance(value, (ast.BinOp, ast.Constant, ast.Name)):
            self.ints[name] = f"({self.integer(value)})"
        else:
            raise TranslateError(f"unknown assignment in generated source: {name} = {text}")

    def same(self, name: str, base: str) -> None:
        spec = self.specs[base]
        self.emit_view(name, base, list(spec.shape), list(spec.stride), 0)

    def call(self, node: ast.Call, name: str | None) -> None:
        function = ast.unparse(node.func)
        if function in _IGNORED_CALLS or function.endswith("set_device"):
            return
        if function.startswith("empty_strided"):
            assert name is not None
            shape, stride = self.dims(node.args[0]), self.dims(node.args[1])
            self.empty(name, TensorSpec(ast.unparse(node.args[2]).removeprefix("torch."), tuple(shape), tuple(stride)))
        elif function == "reinterpret_tensor":
            assert name is not None
            self.reinterpret(name, node)
        elif function in self.definitions:
            self.cpp_kernel(function, node)
        elif function.endswith(".run") and function[:-4] in self.definitions:
            self.generated_kernel(function[:-4], node)
        elif function.startswith("extern_kernels."):
            base = function.removeprefix("extern_kernels.")
            if base not in _EXTERN:
                raise TranslateError(f"no out= form is known for {function}: {ast.unparse(node)}")
            self.operator(_EXTERN[base], node, name)
        elif function.startswith(("torch.ops.", "aten.")):
            parts = function.removeprefix("torch.ops.").split(".")
            self.operator(f"{parts[0]}::{'.'.join(parts[1:])}", node, name)
        else:
            raise TranslateError(f"unknown call in generated source: {ast.unparse(node)}")

    def empty(self, name: str, spec: TensorSpec) -> None:
        self.specs[name] = spec
        self.bundle.code.append(["empty", name, list(spec.shape), list(spec.stride), spec.dtype])

    def reinterpret(self, name: str, node: ast.Call) -> None:
        base = self.tensor(node.args[0])
        offset = self.integer(node.args[3]) if len(node.args) > 3 else 0
        self.emit_view(name, base, self.dims(node.args[1]), self.dims(node.args[2]), offset)

    def emit_view(self, name: str, base: str, shape: list[Any], stride: list[Any], offset: Any) -> None:
        self.specs[name] = TensorSpec(self.specs[base].dtype, tuple(shape), tuple(stride))
        self.bundle.code.append(["view", name, base, shape, stride, offset])

    def tensor(self, node: ast.expr) -> str:
        """The name of a tensor expression; a nested view gets a name of its own."""
        if isinstance(node, ast.Name) and node.id in self.specs:
            return node.id
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "reinterpret_tensor":
            self.count += 1
            name = f"view{self.count}"
            self.reinterpret(name, node)
            return name
        raise TranslateError(f"not a tensor: {ast.unparse(node)}")

    def integer(self, node: ast.expr) -> int | str:
        """An integer expression over T, S and R."""
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return int(node.value)
        text = self.shapes.rename(ast.unparse(_Substitute(self.ints).visit(node)))
        try:
            evaluate(text, {"T": 1009, "S": 101, "R": 53})
        except (ValueError, KeyError) as problem:
            raise TranslateError(f"not an integer expression over T, S and R in generated source: {text}") from problem
        folded = ast.parse(text, mode="eval").body
        return int(ast.literal_eval(folded)) if isinstance(folded, ast.Constant) else text

    def scalar(self, node: ast.expr) -> float | list[Any]:
        """A kernel argument that is no tensor: a float, or ["i", integer expression]."""
        with contextlib.suppress(ValueError):
            if isinstance(number := ast.literal_eval(node), float):
                return number
        return ["i", self.integer(node)]

    def dims(self, node: ast.expr) -> list[int | str]:
        assert isinstance(node, (ast.Tuple, ast.List))
        return [self.integer(e) for e in node.elts]

    def cpp_kernel(self, function: str, node: ast.Call) -> None:
        types, text = (ast.literal_eval(a) for a in self.definitions[function].args[:2])
        symbol = "fused_" + hashlib.sha256(text.encode()).hexdigest()[:16]
        abi = ["ptr" if t.endswith("*") else "f64" if t in ("double", "const double") else "i64" for t in types]
        self.bundle.kernels[symbol] = {"args": abi, "cpp": text.replace(" kernel(", f" {symbol}(")}
        arguments = [
            ["t", self.tensor(a)] if k == "ptr" else self.scalar(a) for k, a in zip(abi, node.args, strict=True)
        ]
        self.bundle.code.append(["kernel", symbol, arguments])

    def generated_kernel(self, function: str, node: ast.Call) -> None:
        arguments = []
        for a in node.args:
            is_tensor = (isinstance(a, ast.Name) and a.id in self.specs) or isinstance(a, ast.Call)
            arguments.append(["t", self.tensor(a)] if is_tensor else self.scalar(a))
        name, text = (ast.literal_eval(a) for a in self.definitions[function].args[:2])
        self.bundle.kernels[function] = {"generated": name, "source": text}
        self.bundle.code.append(["kernel", function, arguments])

    def operator(self, target: str, node: ast.Call, name: str | None) -> None:
        args = [self.plain(a) for a in node.args]
        kwargs = {str(k.arg): self.plain(k.value) for k in node.keywords}
        namespace, rest = target.split("::")
        if target.startswith(f"{C_NAMESPACE}::zeroed"):
            assert name is not None
            count = _unwrapped(args[1])
            self.specs[name] = TensorSpec.contiguous("int32", count)
            self.bundle.code.append(["zeroed", name, count])
        elif target.startswith(f"{C_NAMESPACE}::exchange"):
            assert name is not None
            self.specs[name] = TensorSpec.contiguous("int64", EXCHANGE_WORDS)
            self.bundle.code.append(["exchange", name])
        elif namespace == C_NAMESPACE:
            kernel = c_kernel(rest.split(".")[0])
            abi = ["ptr" if "Tensor" in t else "f64" if t == "float" else "i64" for t in kernel.argument_types]
            self.bundle.kernels[kernel.symbol] = {"args": abi, "c": kernel.symbol}
            self.bundle.code.append(["kernel", kernel.symbol, _arguments(args)])
        elif namespace == GLUON_NAMESPACE:
            self.gluon_kernel(rest.split(".")[0], args)
        elif namespace == TRITON_NAMESPACE:
            self.triton_kernel(*args)
        elif namespace == EXTERN_NAMESPACE:
            self.bundle.code.append(["extern", rest.split(".")[0], _arguments(args)])
        elif "out" in kwargs:
            self.bundle.code.append(["op", target, args, kwargs])
        else:
            assert name is not None, f"{target} returns nothing and has no out argument"
            made = self.fresh_outputs(target, args, kwargs, name)
            self.bundle.code.append(["call", made, target, args, kwargs])

    def triton_kernel(self, tensors: list[Any], numbers: list[Any], grid: list[Any], text: str) -> None:
        call = TritonCall.of(text)
        dtypes = [self.specs[tensor["t"]].dtype for tensor in tensors]
        same = [n if isinstance(n, int) else None for n in (_unwrapped(n) for n in numbers)]
        built = {"call": text, "dtypes": dtypes, "numbers": same}
        symbol = f"{call.kernel.rpartition('.')[2]}_{hashlib.sha256(repr(built).encode()).hexdigest()[:16]}"
        given = dict(zip([*call.tensors, *call.numbers], [*tensors, *numbers], strict=True)) | call.fixed
        self.bundle.kernels[symbol] = built
        self.bundle.code.append(["kernel", symbol, _arguments([*(given[name] for name in changing(call)), *grid])])

    def gluon_kernel(self, kernel: str, args: list[Any]) -> None:
        *given, constants = args
        names = gluon_kernel(kernel).function.arg_names
        dtypes = {n: self.specs[a["t"]].dtype for n, a in zip(names, given, strict=False) if _is_tensor(a)}
        built = {"gluon": kernel, "dtypes": dtypes, "constants": constants}
        symbol = f"{kernel}_{hashlib.sha256(repr(built).encode()).hexdigest()[:16]}"
        self.bundle.kernels[symbol] = built
        self.bundle.code.append(["kernel", symbol, _arguments(given)])

    def fresh_outputs(self, target: str, args: list[Any], kwargs: dict[str, Any], name: str) -> list[str]:
        """Allocate the results of an aten call that has no out= form, by running it on fake tensors."""

        def fake(value: Any) -> Any:
            if isinstance(value, dict) and "t" in value:
                return self.shapes.tensor(self.specs[value["t"]])
            if isinstance(value, dict) and "i" in value:
                return self.shapes._value(value["i"])
            if isinstance(value, dict) and "dtype" in value:
                return getattr(torch, value["dtype"])
            return [fake(v) for v in value] if isinstance(value, list) else value

        with self.shapes.mode:
            result = target_of(target)(*map(fake, args), **{k: fake(v) for k, v in kwargs.items()})
        if isinstance(result, torch.Tensor):
            self.empty(name, self.shapes.spec(result))
            return [name]
        names = [f"{name}_{i}" for i in range(len(result))]
        for n, tensor in zip(names, result, strict=True):
            self.empty(n, self.shapes.spec(tensor))
        self.groups[name] = names
        return names

    def plain(self, node: ast.expr) -> Any:
        """An argument of an aten call as JSON: {"t": tensor}, {"i": integer expression}, {"dtype": name}, {"f": "-inf"}
        or a literal."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.Tuple, ast.List)):
            return [self.plain(e) for e in node.elts]
        text = ast.unparse(node)
        if text.startswith("torch.") and isinstance(getattr(torch, text[6:], None), torch.dtype):
            return {"dtype": text[6:]}
        if (found := re.fullmatch(r"(?:float\(')?(-?inf|nan)(?:'\))?", text)) is not None:
            return {"f": found[1]}
        if (isinstance(node, ast.Name) and node.id in self.specs) or text.startswith("reinterpret_tensor("):
            return {"t": self.tensor(node)}
        if isinstance(node, ast.UnaryOp):
            return ast.literal_eval(node)
        return {"i": self.integer(node)}


def _unwrapped(argument: Any) -> Any:
    """An integer or the expression of one."""
    return argument["i"] if isinstance(argument, dict) else argument


def _is_tensor(argument: Any) -> bool:
    return isinstance(argument, dict) and "t" in argument


def _arguments(args: list[Any]) -> list[Any]:
    """Arguments of an operator in the form of a kernel's arguments."""
    return [[*next(iter(v.items()))] if isinstance(v, dict) else ["i", v] if isinstance(v, int) else v for v in args]


class _Substitute(ast.NodeTransformer):
    def __init__(self, values: dict[str, str]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.parse(self.values[node.id], mode="eval").body if node.id in self.values else node
