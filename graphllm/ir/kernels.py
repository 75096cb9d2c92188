"""How an implementation calls a kernel in C++ so that both plain execution and the compiler see it.

`CKernel` is a C++ function with a plain C ABI. Under a tracer it leaves one node in the graph, which the packager turns
into a direct call: no dispatcher, no Python wrapper at serve time. Kernels in Triton: `graphllm.ir.triton`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import keyword
import os
import subprocess
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from graphllm.config import ConfigError
from graphllm.host.compiler import compiler_command
from graphllm.host.kernel_sources import content

C_NAMESPACE = "graphllm_c"
_library = torch.library.Library(C_NAMESPACE, "FRAGMENT")
_kernels: dict[str, CKernel] = {}


class CKernel:
    """A C++ kernel with C linkage, called by address.

    schema: torch schema of the arguments after the name, as ``(Tensor x, Tensor(a!) out, SymInt T, float eps) -> ()``;
    it must return nothing and mark every written tensor. ABI: Tensor -> pointer to its first element (None -> null),
    SymInt/int/bool -> int64_t, float -> double, in schema order. Sizes and strides that the kernel needs are arguments.
    source: the C++ file; it may include only the headers in its folder and in the ops folder, the standard library,
    OpenMP and the compiler's intrinsics. usual: whether most models with the op call it, so that compiling it begins
    before it is known. Raises ConfigError when the source does not exist, and for an argument that is named by a word
    of Python, such as "from".
    """

    def __init__(self, symbol: str, schema: str, source: Path, usual: bool = True) -> None:
        if not source.is_file():
            raise ConfigError(
                f"kernel {symbol}: its source {source} does not exist; a package installs C++ only if its "
                'pyproject.toml names it, as in [tool.setuptools.package-data] "*" = ["*.cpp", "*.h"]'
            )
        self.symbol, self.schema, self.source, self.usual = symbol, schema, source, usual
        _library.define(symbol + schema)
        _library.impl(symbol, self._run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{C_NAMESPACE}::{symbol}", lambda *args: None, lib=_library)
        self.overload: torch._ops.OpOverload = getattr(getattr(torch.ops, C_NAMESPACE), symbol).default
        if words := [a.name for a in self.overload._schema.arguments if keyword.iskeyword(a.name)]:
            raise ConfigError(
                f"kernel {symbol}: {words[0]!r} is a word of Python, which no argument can have as its name; give it "
                "another one in the schema"
            )
        self.argument_types = tuple(str(a.type) for a in self.overload._schema.arguments)
        self._function: Callable[..., None] | None = None
        _kernels[symbol] = self

    def __call__(self, *args: Any) -> None:
        self.overload(*args)

    def _run(self, *args: Any) -> None:
        if self._function is None:
            self._function = bind_symbol(ctypes.CDLL(str(build_library(self.source))), self.symbol, self.argument_types)
        self._function(*(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args))


def float_kernels(symbol: str, schema: str, source: Path, usual: bool = True) -> dict[torch.dtype, CKernel]:
    """Two kernels by the dtype that they compute with: ``symbol`` with _f32 and with _bf16."""
    names = {torch.float32: "f32", torch.bfloat16: "bf16"}
    return {dtype: CKernel(f"{symbol}_{name}", schema, source, usual) for dtype, name in names.items()}


def c_kernel(symbol: str) -> CKernel:
    """The declared kernel of that symbol."""
    return _kernels[symbol]


def sources_in(folders: Collection[Path]) -> list[Path]:
    """The sources of the usual kernels that lie in one of these folders."""
    return sorted({k.source for k in _kernels.values() if k.usual and k.source.parent in folders})


def bind_symbol(library: ctypes.CDLL, symbol: str, argument_types: Sequence[str]) -> Callable[..., None]:
    """The C function of ``symbol`` with its ctypes signature set from torch schema types."""
    function = getattr(library, symbol)
    function.restype = None
    function.argtypes = [c_type(t) for t in argument_types]
    return function


def c_type(schema_type: str) -> type:
    """The ctypes type of a torch schema type under the `CKernel` ABI."""
    if "Tensor" in schema_type:
        return ctypes.c_void_p
    return ctypes.c_double if schema_type == "float" else ctypes.c_int64


def build_library(source: Path) -> Path:
    """Compile a kernel for direct calls outside an artifact (tests, `graphllm op bench`); cached by content."""
    digest = hashlib.sha256(content(source) + torch.__version__.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"graphllm-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{digest}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made, linked = Path(scratch, "kernel.o"), Path(scratch, library.name)
            for command in (compiler_command([source], made, link=False), compiler_command([made], linked)):
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(f"g++ failed on {source.name}:\n{done.stderr[-4000:]}")
            linked.replace(library)
    return library


@torch.library.custom_op(f"{C_NAMESPACE}::zeroed", mutates_args=())
def zeroed(like: torch.Tensor, count: int) -> torch.Tensor:
    """``count`` int32 zeros on the device of ``like``: scratch that a kernel must leave as zeros.

    One buffer serves all kernels, which run one after another: here it is made once, in an artifact at start-up.
    """
    return _zeros(-(-count // _ZEROS) * _ZEROS, like.device)[:count]


_ZEROS = 1 << 16


@functools.cache
def _zeros(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


@zeroed.register_fake
def _(like: torch.Tensor, count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int32, device=like.device)
