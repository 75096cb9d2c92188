"""Builds the Triton kernels of every op for sm_90 without a GPU, at the small cases of each implementation and with its
first and last launch constants, as far as PTX: what the interpreter takes and the compiler does not. A program, because
the interpreter is chosen at import: to be run without TRITON_INTERPRET, on the ops that are named, or all."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import triton
from torch.fx.experimental.proxy_tensor import make_fx

from graphllm.compile.codegen.cubins import TargetOnly, compiled, compiled_gluon
from graphllm.config import Target
from graphllm.ir.gluon import GLUON_NAMESPACE, gluon_kernel
from graphllm.ir.op import CallSite, Impl, Op
from graphllm.ir.registry import load_ops
from graphllm.ir.testing import Maker
from graphllm.ir.testing.check import cases_of
from graphllm.ir.triton import TRITON_NAMESPACE, TritonCall

TARGET = Target("cuda", ("sm_90", "sms_132"), "H200")


def launches(op: Op, impl: Impl) -> Iterator[torch.fx.Node]:
    """Calls of the Triton and Gluon kernels that an implementation starts at the small cases that it takes, as a tracer
    records them."""
    maker = Maker(torch.Generator(), torch.device("cpu"), torch.bfloat16)
    small = [c for c in cases_of(op) if c.size == "small"]
    of_ranks = (1, 2, 4) if "ranks" in op.signature.parameters else (1,)
    for case, ranks, deterministic in itertools.product(small, of_ranks, (False, True)):
        args = op.bind((), {**case.inputs(maker), **({"ranks": ranks} if ranks > 1 else {})})
        site = CallSite(args, TARGET, case.bucket, deterministic=deterministic)
        if not impl.supports(site):
            continue
        tensors = {n: v for n, v in args.items() if isinstance(v, torch.Tensor)}
        others = {n: v for n, v in args.items() if n not in tensors}
        configs = [c for c in impl.configs(site) if not deterministic or impl.row_order(site, c)]
        for config in configs[:: max(1, len(configs) - 1)]:
            fn = functools.partial(impl.fn, **others, **config)
            graph = make_fx(_of_names(fn), tracing_mode="fake")(tensors).graph
            yield from (n for n in graph.nodes if _called(n)[0] in (TRITON_NAMESPACE, GLUON_NAMESPACE))


def _of_names(fn: Callable[..., Any]) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: fn(**tensors)


def _called(node: torch.fx.Node) -> tuple[str, str]:
    """Namespace and name of the operator that a node calls, empty where it calls none."""
    schema = getattr(node.target, "_schema", None)
    namespace, _, name = schema.name.partition("::") if schema else ("", "", "")
    return namespace, name


def build(node: torch.fx.Node, built: dict[str, str]) -> str:
    """PTX of a recorded launch; equal ones are built once."""
    namespace, name = _called(node)
    return _build_gluon(name, node, built) if namespace == GLUON_NAMESPACE else _build_triton(node, built)


def _build_gluon(name: str, node: torch.fx.Node, built: dict[str, str]) -> str:
    kernel, constants = gluon_kernel(name), node.args[-1]
    names = kernel.function.arg_names
    given = {n: v.meta["val"] for n, v in zip(names, node.args, strict=False) if isinstance(v, torch.fx.Node)}
    dtypes = {n: _dtype(v) for n, v in given.items() if isinstance(v, torch.Tensor)}
    key = repr((kernel.name, dtypes, constants))
    if key not in built:
        built[key] = compiled_gluon(kernel, dtypes, constants, TARGET).asm["ptx"]
    return built[key]


def _build_triton(node: torch.fx.Node, built: dict[str, str]) -> str:
    tensors, numbers, _, text = node.args
    call = TritonCall.of(text)
    dtypes = [_dtype(tensor.meta["val"]) for tensor in tensors]
    known = [n if isinstance(n, int) else None for n in numbers]
    key = repr((dtypes, known, text))
    if key not in built:
        built[key] = compiled(call, dtypes, known, TARGET).asm["ptx"]
    return built[key]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def main(names: Collection[str]) -> None:
    triton.runtime.driver.set_active(TargetOnly(TARGET))
    for op in load_ops().values():
        for impl in op.impls.values():
            if impl.device == "cuda" and (not names or op.name in names):
                built: dict[str, str] = {}
                for call in launches(op, impl):
                    build(call, built)
                print(op.name, impl.name, len(built), all(".target sm_90" in ptx for ptx in built.values()), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
