"""Builds the Triton kernels of every op for sm_90 without a GPU, at the small cases of each implementation and with its
first and last launch constants, as far as PTX: what the interpreter takes and the compiler does not. A program, because
the interpreter is chosen at import: to be run without TRITON_INTERPRET, on the ops that are named, or all."""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from graphllm.compile.gluon import compiled
from graphllm.config import Target
from graphllm.ir.gluon import GLUON_NAMESPACE, gluon_kernel
from graphllm.ir.op import CallSite, Impl, Op
from graphllm.ir.registry import load_ops
from graphllm.ir.testing import Maker
from graphllm.ir.testing.check import cases_of

TARGET = Target("cuda", ("sm_90", "sms_132"), "H200")
POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.float32: "*fp32", torch.float64: "*fp64", torch.int64: "*i64", torch.int32: "*i32",
    torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8", torch.bool: "*i1",
    torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip


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
            yield from (n for n in graph.nodes if "triton_kernel_wrapper" in str(n.target) or _gluon_name(n))


def _of_names(fn: Callable[..., Any]) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: fn(**tensors)


def _gluon_name(node: torch.fx.Node) -> str:
    """Of the Gluon kernel that a node calls, empty where it calls none."""
    schema = getattr(node.target, "_schema", None)
    namespace, _, name = schema.name.partition("::") if schema else ("", "", "")
    return name if namespace == GLUON_NAMESPACE else ""


def build(node: torch.fx.Node, built: dict[str, str]) -> str:
    """PTX of a recorded launch; equal ones are built once."""
    return _build_gluon(node, built) if _gluon_name(node) else _build_triton(node.kwargs, built)


def _build_gluon(node: torch.fx.Node, built: dict[str, str]) -> str:
    kernel, constants = gluon_kernel(_gluon_name(node)), json.loads(node.args[-1])
    names = kernel.function.arg_names
    given = {n: v.meta["val"] for n, v in zip(names, node.args, strict=False) if isinstance(v, torch.fx.Node)}
    dtypes = {n: str(v.dtype).removeprefix("torch.") for n, v in given.items() if isinstance(v, torch.Tensor)}
    key = repr((kernel.name, dtypes, constants))
    if key not in built:
        built[key] = compiled(kernel, dtypes, constants, TARGET).asm["ptx"]
    return built[key]


def _build_triton(call: Mapping[str, Any], built: dict[str, str]) -> str:
    kernel = kernel_side_table.get_kernel(call["kernel_idx"])
    given = {**kernel_side_table.get_constant_args(call["constant_args_idx"]), **call["kwargs"]}
    options = {}
    if hasattr(kernel, "configs"):  # what the tracer makes of launch options
        (config,) = kernel.configs
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        kernel = kernel.fn
    constant = {p.name for p in kernel.params if p.is_constexpr}
    signature, constants, aligned = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = given[name]
        value = value.meta["val"] if isinstance(value, torch.fx.Node) else value
        if name in constant:
            signature[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], aligned[(i,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    key = repr((kernel.fn, signature, constants, sorted(aligned), options))
    if key not in built:
        built[key] = _ptx(kernel, signature, constants, aligned, options)
    return built[key]


def _ptx(kernel: Any, signature: dict, constants: dict, aligned: dict, options: dict) -> str:
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def main(names: Collection[str]) -> None:
    assert triton_kernel_wrapper_functional  # registers the operator that tracers record
    for op in load_ops().values():
        for impl in op.impls.values():
            if impl.device == "cuda" and (not names or op.name in names):
                built: dict[str, str] = {}
                for call in launches(op, impl):
                    build(call, built)
                print(op.name, impl.name, len(built), all(".target sm_90" in ptx for ptx in built.values()), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
