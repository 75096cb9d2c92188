"""Gluon kernels to cubins: as a call of one says what its arguments are, built by Triton without running it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from graphllm.config import Target
from graphllm.ir.gluon import GluonKernel, gluon_kernel

_POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32",
    torch.int16: "*i16", torch.uint8: "*u8",
}  # fmt: skip


def signature(kernel: GluonKernel, dtypes: Mapping[str, str], constants: Mapping[str, Any]) -> dict[str, str]:
    """Triton's types of a kernel's arguments, from the dtypes of those that are tensors."""
    names = kernel.function.arg_names
    pointers = {name: _POINTERS[getattr(torch, dtype)] for name, dtype in dtypes.items()}
    return {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}


def compiled(kernel: GluonKernel, dtypes: Mapping[str, str], constants: Mapping[str, Any], target: Target) -> Any:
    """Triton's compiled kernel for a GPU. constants: those of the kernel, and options of Triton's compiler."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.function.arg_names
    options = {name: value for name, value in constants.items() if name not in names}
    constants = {name: value for name, value in constants.items() if name in names}
    source = GluonASTSource(
        kernel.function,
        signature(kernel, dtypes, constants),
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in dtypes},
    )
    gpu = GPUTarget("cuda", int(target.arch[0].removeprefix("sm_")), 32)
    return compile(source, target=gpu, options={"num_warps": kernel.warps, **options})


def described(call: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """A kernel of a `Bundle` as `graphllm.runtime.kernels.CudaKernels` launches it, its cubin among it. call: its
    "gluon", the kernel's name, its "dtypes" by argument and its "constants", as JSON."""
    kernel, constants = gluon_kernel(call["gluon"]), json.loads(call["constants"])
    binary = compiled(kernel, call["dtypes"], constants, target)
    names = [name for name in kernel.function.arg_names if name not in constants]
    return {
        "cubin": binary.asm["cubin"],
        "symbol": binary.metadata.name,
        "shared": binary.metadata.shared,
        "warps": binary.metadata.num_warps,
        "scratch": binary.metadata.global_scratch_size,
        "early": kernel.early,
        "names": [*names, "programs"],
        "args": [*("ptr" if name in call["dtypes"] else "i32" for name in names), None],
        "prefix": [],
        "grid": ["programs", 1, 1],
    }
