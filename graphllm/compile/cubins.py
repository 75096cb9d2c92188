"""Triton and Gluon kernels to cubins: as a call of one says what its arguments are, built by Triton without running it.

Arguments are typed as Triton does where it starts a kernel, so what tuning compiled is found in its cache.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from graphllm.compile.turns import kernel_turn
from graphllm.config import Target
from graphllm.ir.gluon import GluonKernel, gluon_kernel
from graphllm.ir.triton import GRID, TritonCall, changing, starts_early, triton_kernel

_POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8",
    torch.bool: "*i1", torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5",
}  # fmt: skip
_KINDS = {
    "i1": "i8",
    "u1": "u8",
    "fp32": "f32",
    "fp64": "f64",
}  # of `CudaKernels`, where they differ
_MULTIPLE = [["tt.divisibility", 16]]


class Typed(NamedTuple):
    """Triton's types of a kernel's arguments, by name; values of those that it is compiled for; what else it may know,
    by position."""

    types: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]


def kind_of(triton_type: str) -> str | None:
    """How a launch hands over an argument of this type; None where the kernel was compiled for its value."""
    if triton_type == "constexpr":
        return None
    return "ptr" if triton_type.startswith("*") else _KINDS.get(triton_type, triton_type)


def typed(call: TritonCall, dtypes: Sequence[str], numbers: Sequence[int | None]) -> Typed:
    """A Triton kernel's arguments. dtypes: of the call's tensors. numbers: the call's; None for one that differs from
    launch to launch, of which nothing but that it fits 32 bits is known then."""
    pointers = {n: _POINTERS[getattr(torch, d)] for n, d in zip(call.tensors, dtypes, strict=True)}
    integers = dict(zip(call.numbers, numbers, strict=True))
    made = Typed({}, {}, {})
    for i, p in enumerate(triton_kernel(call.kernel).params):
        value = integers[p.name] if p.name in integers else call.fixed.get(p.name)
        one = p.name in integers and value == 1 and not p.do_not_specialize and not p.annotation_type
        if p.is_constexpr or one or (value is None and p.name not in pointers and p.name not in integers):
            made.types[p.name], made.constants[p.name] = "constexpr", value
            continue
        multiple = False
        if p.name in pointers:
            kind, multiple = pointers[p.name], p.name not in call.unaligned
        elif p.name in integers:
            kind = "i32" if value is None or -(2**31) <= value < 2**31 else "i64"
            multiple = value is not None and value % 16 == 0
        else:
            kind = "u1" if isinstance(value, bool) else "fp32"
        made.types[p.name] = p.annotation_type or kind
        if not p.do_not_specialize and kind not in ("u1", "fp32"):
            made.attributes[(i,)] = _MULTIPLE if multiple and not p.do_not_specialize_on_alignment else []
    return made


def compiled(call: TritonCall, types: Typed, target: Target) -> Any:
    """Triton's compiled kernel for a GPU."""
    from triton.compiler import ASTSource

    kernel = triton_kernel(call.kernel)
    constants = {(kernel.arg_names.index(name),): value for name, value in types.constants.items()}
    options = {name: value for name, value in call.fixed.items() if name not in kernel.arg_names}
    source = ASTSource(kernel, types.types, constants, types.attributes)
    return _compiled(source, {"launch_pdl": starts_early(kernel), **options}, target)


def compiled_gluon(kernel: GluonKernel, dtypes: Mapping[str, str], constants: Mapping[str, Any], target: Target) -> Any:
    """The same of a Gluon kernel. dtypes: of the arguments that are tensors. constants: those of the kernel, and
    options of Triton's compiler."""
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.function.arg_names
    options = {name: value for name, value in constants.items() if name not in names}
    constants = {name: value for name, value in constants.items() if name in names}
    pointers = {name: _POINTERS[getattr(torch, dtype)] for name, dtype in dtypes.items()}
    source = GluonASTSource(
        kernel.function,
        {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): _MULTIPLE for name in dtypes},
    )
    return _compiled(source, {"num_warps": kernel.warps, **options}, target)


def _compiled(source: Any, options: Mapping[str, Any], target: Target) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile

    return compile(source, target=GPUTarget("cuda", int(target.arch[0].removeprefix("sm_")), 32), options=options)


def described(call: Mapping[str, Any], target: Target, turns: Path | None = None) -> dict[str, Any]:
    """A kernel of a `Bundle` as `graphllm.runtime.kernels.CudaKernels` launches it, its cubin among it. call: the
    kernel's "call", the "dtypes" of its tensors and its "numbers", see `typed`. turns: of processes that compile beside
    this one, see `graphllm.compile.turns`."""
    told = TritonCall.of(call["call"])
    types = typed(told, call["dtypes"], call["numbers"])
    names = changing(told)
    with kernel_turn(turns, repr((told.kernel, types, told.fixed))):
        binary = compiled(told, types, target)
    return {
        **launched(binary),
        "names": [*names, *GRID],
        "args": [*(kind_of(types.types[name]) for name in names), *[None] * len(GRID)],
        "prefix": [],
        "grid": GRID,
    }


def described_gluon(call: Mapping[str, Any], target: Target, turns: Path | None = None) -> dict[str, Any]:
    """The same of a Gluon kernel. call: its "gluon", the kernel's name, its "dtypes" by argument and its "constants",
    as JSON."""
    kernel, constants = gluon_kernel(call["gluon"]), json.loads(call["constants"])
    names = [name for name in kernel.function.arg_names if name not in constants]
    with kernel_turn(turns, repr(call)):
        binary = compiled_gluon(kernel, call["dtypes"], constants, target)
    return {
        **launched(binary),
        "early": kernel.early,
        "names": [*names, "programs"],
        "args": [*("ptr" if name in call["dtypes"] else "i32" for name in names), None],
        "prefix": [],
        "grid": ["programs", 1, 1],
    }


def launched(binary: Any) -> dict[str, Any]:
    """What of a compiled kernel every launch needs: cubin (bytes), symbol, shared (bytes), warps, scratch (bytes of
    global memory for each of its programs), early (whether it may start while the kernel before it runs, because it
    waits for that one itself)."""
    metadata = binary.metadata
    if getattr(metadata, "num_ctas", 1) != 1:
        raise NotImplementedError(f"kernel {metadata.name} wants clusters, which pieces do not provide")
    return {
        "cubin": binary.asm["cubin"],
        "symbol": metadata.name,
        "shared": metadata.shared,
        "warps": metadata.num_warps,
        "scratch": getattr(metadata, "global_scratch_size", 0),
        "early": "griddepcontrol.wait" in binary.asm["ptx"],
    }
