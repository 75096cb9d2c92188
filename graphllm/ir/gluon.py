"""Kernels in Gluon, Triton's language beneath Triton: layouts, shared memory and which warps do what are written down.

They are declared like those in C++ and built by `graphllm.compile.codegen.cubins`. Triton's interpreter does not know
them: an implementation that launches one supports no site under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from graphllm.config import Target
from graphllm.ir.triton import give_scratch

GLUON_NAMESPACE = "graphllm_gluon"
_library = torch.library.Library(GLUON_NAMESPACE, "FRAGMENT")
_kernels: dict[str, GluonKernel] = {}


def runs_gluon(target: Target) -> bool:
    """Whether kernels in Gluon run there: on Hopper, as they name its units, and not in Triton's interpreter."""
    import triton

    return target.arch[:1] == ("sm_90",) and not triton.knobs.runtime.interpret


class GluonKernel:
    """A kernel by a function that `triton.experimental.gluon.jit` made; tracers record one node for a call of it.

    schema: of the function's arguments before its constants, which come last in it, as for
    `graphllm.ir.kernels.CKernel`: "(Tensor x, Tensor(a!) out, SymInt T) -> ()". Tensors begin at multiples of 16 bytes.
    warps: of a program where it begins, before it gives work to others. early: whether it waits on the device for the
    kernel before it, so that it may be started while that one runs.
    """

    def __init__(self, function: Any, schema: str, warps: int, early: bool = False) -> None:
        self.function, self.warps, self.early, self.name = function, warps, early, function.__name__
        schema = schema.replace(") ->", ", SymInt programs, str constants) ->")
        _library.define(self.name + schema)
        _library.impl(self.name, self._run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{GLUON_NAMESPACE}::{self.name}", self._compile, lib=_library)
        self.overload: torch._ops.OpOverload = getattr(getattr(torch.ops, GLUON_NAMESPACE), self.name).default
        _kernels[self.name] = self

    def __call__(self, programs: int | torch.SymInt, *args: Any, **constants: Any) -> None:
        """Launch ``programs`` programs. args: as the schema has them. constants: the function's, and options of
        Triton's
        compiler: maxnreg, the registers of a thread where a program begins, says how many programs fit; num_warps takes
        the place of the kernel's ``warps``."""
        self.overload(*args, programs, json.dumps(constants))

    def _run(self, *args: Any) -> None:
        *given, programs, constants = args
        give_scratch()
        self.function[(programs,)](*given, **self.options(constants))

    def _compile(self, *args: Any) -> None:
        """With tensors on "meta" that are no tracer's: see `launch_triton`."""
        *given, programs, constants = args
        if not any(isinstance(a, FakeTensor) for a in given):
            self.function.warmup(*given, grid=(programs,), **self.options(constants))

    def options(self, constants: str) -> dict[str, Any]:
        """What the function is compiled for, from the last argument of a call."""
        return {"num_warps": self.warps, "launch_pdl": self.early, **json.loads(constants)}


def gluon_kernel(name: str) -> GluonKernel:
    """The declared kernel of that name."""
    return _kernels[name]
