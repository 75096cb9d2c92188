"""Triton and Gluon kernels to cubins: as a call of one says what its arguments are, built by Triton without running it.

A Triton kernel is compiled as tuning compiles it, so what that left in Triton's cache is found there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphllm.compile.codegen.file_locks import kernel_turn
from graphllm.config import Target
from graphllm.ir.gluon import GluonKernel, gluon_kernel
from graphllm.ir.triton import GRID, TritonCall, changing, starts_early, triton_kernel

_KINDS = {"i1": "i8", "u1": "u8", "fp32": "f32", "fp64": "f64"}  # of `CudaKernels`, where they differ
_ODD = 4  # an address that is no multiple of 16
_ANY = 1009  # no 1 and no multiple of 16: Triton compiles for what it sees
_WARP = 32  # threads


class TargetOnly:
    """What Triton asks of a driver while it compiles. Nothing is started with it, and no GPU needed."""

    def __init__(self, target: Target) -> None:
        from triton.backends.compiler import GPUTarget

        capability = next(int(a.removeprefix("sm_")) for a in target.arch if a.startswith("sm_"))
        self._target = GPUTarget("cuda", capability, _WARP)

    def get_current_target(self) -> Any:
        """Of the only device."""
        return self._target

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """One that nothing is started in."""
        return 0


@dataclass(frozen=True)
class _Pointer:
    """A tensor as Triton looks at it where it is to compile for one."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


def kind_of(triton_type: str) -> str | None:
    """How a launch hands over an argument of this type; None where the kernel was compiled for its value."""
    if triton_type == "constexpr":
        return None
    return "ptr" if triton_type.startswith("*") else _KINDS.get(triton_type, triton_type)


def compiled(call: TritonCall, dtypes: Sequence[str], numbers: Sequence[int | None], target: Target) -> Any:
    """Triton's compiled kernel for a GPU.

    dtypes: of the call's tensors.
    numbers: the call's; None for a number that differs from launch to launch: it is only known to fit 32 bits.
    """
    addresses = [_ODD if name in call.unaligned else 0 for name in call.tensors]
    pointers = [_Pointer(getattr(torch, dtype), address) for dtype, address in zip(dtypes, addresses, strict=True)]
    known = [_ANY if number is None else number for number in numbers]
    kernel = triton_kernel(call.kernel)
    given = dict(zip([*call.tensors, *call.numbers], [*pointers, *known], strict=True)) | call.fixed
    return _compiled(kernel, {**given, "launch_pdl": starts_early(kernel)}, target)


def compiled_gluon(kernel: GluonKernel, dtypes: Mapping[str, str], constants: str, target: Target) -> Any:
    """The same of a Gluon kernel.

    dtypes: of the arguments that are tensors.
    constants: see `GluonKernel`.
    """
    options = kernel.options(constants)
    given = {name: _ANY for name in kernel.function.arg_names if name not in options} | {
        name: _Pointer(getattr(torch, dtype), 0) for name, dtype in dtypes.items()
    }
    return _compiled(kernel.function, {**given, **options}, target)


def _compiled(kernel: Any, given: Mapping[str, Any], target: Target) -> Any:
    from triton.runtime import driver

    before = driver.active
    driver.set_active(TargetOnly(target))
    try:
        return kernel.warmup(grid=(1, 1, 1), **given)
    finally:
        driver.set_active(before)


def described(call: Mapping[str, Any], target: Target, turns: Path | None = None) -> dict[str, Any]:
    """A kernel of a `Bundle` as `graphllm.runtime.kernels.CudaKernels` launches it, with its cubin.

    call: the kernel's "call", the "dtypes" of its tensors and its "numbers", see `compiled`.
    turns: of processes that compile at the same time, see `graphllm.compile.codegen.file_locks`.
    """
    launch = TritonCall.of(call["call"])
    with kernel_turn(turns, repr(call)):
        binary = compiled(launch, call["dtypes"], call["numbers"], target)
    return _described(binary, changing(launch), GRID)


def described_gluon(call: Mapping[str, Any], target: Target, turns: Path | None = None) -> dict[str, Any]:
    """The same of a Gluon kernel. call: its "gluon", the kernel's name, its "dtypes" by argument and its "constants",
    as JSON."""
    kernel = gluon_kernel(call["gluon"])
    options = kernel.options(call["constants"])
    with kernel_turn(turns, repr(call)):
        binary = compiled_gluon(kernel, call["dtypes"], call["constants"], target)
    names = [name for name in kernel.function.arg_names if name not in options]
    return {**_described(binary, names, ["programs"]), "early": kernel.early}


def _described(binary: Any, names: Sequence[str], grid: Sequence[str]) -> dict[str, Any]:
    """The launch data of a compiled kernel.

    names: arguments of a launch.
    grid: names of the numbers of programs, which follow the arguments.
    """
    return {
        **launched(binary),
        "names": [*names, *grid],
        "args": [*(kind_of(binary.src.signature[name]) for name in names), *[None] * len(grid)],
        "prefix": [],
        "grid": [*grid, *[1] * (3 - len(grid))],
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
