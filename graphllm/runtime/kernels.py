"""Load compiled kernels and call them by address: a shared library on a CPU, cubins through the CUDA driver on a GPU.

Needs no compiler and imports neither Inductor, Dynamo nor Triton. A bound launch is a callable without arguments.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

from graphllm.host.cuda_driver import CudaDriver
from graphllm.host.libraries import Libraries, openmp
from graphllm.program.expr import value
from graphllm.runtime.cuda.functions import CudaFunctions

_C_TYPES = {"ptr": ctypes.c_void_p, "i64": ctypes.c_int64, "i32": ctypes.c_int32, "f64": ctypes.c_double,
            "f32": ctypes.c_float, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "u8": ctypes.c_uint8,
            "u32": ctypes.c_uint32, "u64": ctypes.c_uint64}  # fmt: skip
Launch = Callable[[], Any]


class Kernels(Protocol):
    """Binds one kernel call: ``arguments`` are addresses, ints and floats in the kernel's order."""

    @property
    def done(self) -> int:
        """How many have run, where the host can tell, else 0: a step that is slow gets on, one that is stuck does
        not."""
        ...

    def bind(self, kernel: Mapping[str, Any], name: str, arguments: Sequence[Any]) -> Launch: ...

    def join(self, launches: Sequence[Launch]) -> list[Launch]:
        """The same work in fewer launches, where that is cheaper."""
        ...


class _Argument(ctypes.Union):
    _fields_ = (("ptr", ctypes.c_void_p), ("i64", ctypes.c_int64), ("f64", ctypes.c_double))


class _Call(ctypes.Structure):
    _fields_ = (("kernel", ctypes.c_void_p), ("arguments", ctypes.c_void_p))


class CpuKernel(NamedTuple):
    """A kernel with its arguments. address: of the function that takes them from memory. program: of a loop, kept."""

    name: str
    address: int | None
    arguments: ctypes.Array[_Argument]
    program: ctypes.Array[ctypes.c_int64] | None = None


class CpuLaunch:
    """Kernels called one after another without the interpreter, so other Python threads may run."""

    def __init__(self, kernels: Sequence[CpuKernel], run: Callable[..., None]) -> None:
        self.kernels = kernels
        calls = (_Call * len(kernels))(*(_Call(k.address, ctypes.addressof(k.arguments)) for k in kernels))
        self._run = functools.partial(run, calls, ctypes.c_int64(len(kernels)))

    def __call__(self) -> None:
        self._run()


class CpuKernels:
    """The shared libraries that pieces call: the artifact's own, or prebuilt ones. `graphllm.compile.codegen.calls` and
    ops/cpu/calls.h are their side of the calls.

    libraries: none where every piece is interpreted.
    """

    def __init__(self, libraries: Libraries) -> None:
        self._libraries = libraries
        self._run = libraries.find("graphllm_run")
        self._done = libraries.number("graphllm_done")
        self._addresses: dict[str, int | None] = {}

    @property
    def done(self) -> int:
        return self._done.value

    @property
    def threads(self) -> int:
        """That OpenMP gives the kernels if nobody says otherwise."""
        return int(openmp().omp_get_max_threads()) if self._run else 1

    def set_threads(self, threads: int) -> None:
        """Set the number of threads for the calling thread's kernels."""
        if self._run:
            openmp().omp_set_num_threads(threads)

    def bind(self, kernel: Mapping[str, Any], name: str, arguments: Sequence[Any]) -> CpuLaunch:
        """A call of ``name`` with converted arguments."""
        symbol = kernel.get("c", name)
        if symbol not in self._addresses:
            self._addresses[symbol] = ctypes.cast(self._libraries.find(f"call_{symbol}"), ctypes.c_void_p).value
        cells = (_Argument * len(arguments))()
        for cell, kind, argument in zip(cells, kernel["args"], arguments, strict=True):
            setattr(cell, kind, argument)
        program = None
        if "program" in kernel:  # of a loop: its first argument
            program = (ctypes.c_int64 * len(kernel["program"]))(*kernel["program"])
            cells[0].ptr = ctypes.addressof(program)
        return self._launch([CpuKernel(name, self._addresses[symbol], cells, program)])

    def join(self, launches: Sequence[Launch]) -> list[Launch]:
        """One launch for all kernels that follow each other: Python then costs nothing between them, and need not be
        had back from another thread."""
        joined: list[Launch] = []
        for ours, group in itertools.groupby(launches, lambda launch: isinstance(launch, CpuLaunch)):
            run = list(group)
            if ours:
                run = [self._launch([k for launch in cast(list[CpuLaunch], run) for k in launch.kernels])]
            joined += run
        return joined

    def _launch(self, kernels: Sequence[CpuKernel]) -> CpuLaunch:
        return CpuLaunch(kernels, self._run)


_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute with an int as its value."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((f"{kind}{axis}", ctypes.c_uint) for kind in ("grid", "block") for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class CudaKernels:
    """Functions of the artifact's cubins, launched on one stream."""

    done = 0

    def __init__(self, functions: CudaFunctions, stream: int) -> None:
        self._functions, self._driver, self._stream = functions, functions.driver, ctypes.c_void_p(stream)
        self._scratch: dict[tuple[int, int], int] = {}  # addresses by size and turn
        self._turn = 0

    def bind(self, kernel: Mapping[str, Any], name: str, arguments: Sequence[Any]) -> Launch:
        """A launch with its grid evaluated and its parameter block laid out once. A kernel marked early waits for the
        one before it on the device, so the driver may start it while that one still runs."""
        named = dict(zip(kernel["names"], arguments, strict=True))
        for variable, expression in kernel.get("prefix", ()):
            named[variable] = value(expression, named)
        grid = [value(g, named) for g in kernel["grid"]]
        if 0 in grid:
            return _nothing
        used = [(kind, named[n]) for n, kind in zip(kernel["names"], kernel["args"], strict=True) if kind]
        # Triton kernels take two more pointers: to scratch memory, and to that of profilers.
        scratch = ctypes.c_void_p(self._scratch_memory(kernel["scratch"] * math.prod(grid)))
        cells = [*(_C_TYPES[kind](v) for kind, v in used), scratch, ctypes.c_void_p()]
        block = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(c) for c in cells))
        attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        config = _LaunchConfig(
            *grid, 32 * kernel["warps"], 1, 1, kernel["shared"], self._stream,
            ctypes.pointer(attribute), int(kernel["early"]),
        )  # fmt: skip
        launch = functools.partial(
            self._driver.library.cuLaunchKernelEx,
            ctypes.byref(config),
            self._functions.get(kernel),
            block,
            ctypes.c_void_p(),
        )
        return _Checked(launch, name, (cells, block, config), self._driver)

    def _scratch_memory(self, size: int) -> int | None:
        """Scratch memory for one launch. Two buffers alternate, because the previous kernel may still be running. A
        third kernel cannot begin before that one ends, see `ops/gemm/fused_linear/gluon_product.py`."""
        if not size:
            return None
        self._turn = 1 - self._turn
        if (size, self._turn) not in self._scratch:
            address = ctypes.c_void_p()
            self._driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
            self._scratch[size, self._turn] = address.value or 0
        return self._scratch[size, self._turn]

    def join(self, launches: Sequence[Launch]) -> list[Launch]:
        """As they are: graphs join them."""
        return list(launches)


class _Checked:
    """A launch that keeps its parameter block alive and raises on failure."""

    __slots__ = ("_driver", "_keep", "_launch", "_name")

    def __init__(self, launch: Callable[[], int], name: str, keep: object, driver: CudaDriver) -> None:
        self._launch, self._name, self._keep, self._driver = launch, name, keep, driver

    def __call__(self) -> None:
        code = self._launch()
        if code:
            self._driver.check(code, f"launch of {self._name}")


def _nothing() -> None:
    """A launch over an empty grid."""
