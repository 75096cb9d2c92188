"""The codegen backend of prebuilt kernels: nothing is generated, and with all libraries there no compiler runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._decomp import get_decompositions

from graphllm.compile.codegen.calls import call_source, has_calls
from graphllm.compile.codegen.jobs import Built
from graphllm.compile.codegen.lower import lower_piece
from graphllm.compile.codegen.objects import Objects
from graphllm.compile.codegen.prebuilt.program import KERNEL
from graphllm.compile.codegen.prebuilt.writer import bundle_of
from graphllm.config import Bucket, CompileConfig
from graphllm.host.kernel_sources import LOOPS, library_name
from graphllm.host.prebuilt import find_library, made_here
from graphllm.ir.kernels import c_kernel
from graphllm.rewrite import ImplChoice


class Prebuilt:
    """See `backends.Backend`. objects: compiles libraries that are not there yet."""

    def __init__(self, objects: Objects | None) -> None:
        self._objects = objects

    def prepare(self) -> None:
        """This file has imported it."""

    def build(
        self, piece: Mapping[str, Any], bucket: Bucket, config: CompileConfig, choices: Mapping[str, ImplChoice]
    ) -> Built:
        """A piece for a bucket."""
        lowered, reports = lower_piece(piece, bucket, config, choices, decompositions())
        text = lowered.graph.print_readable(print_output=False)
        made = bundle_of(lowered)
        plain = {"inputs": made.inputs, "outputs": made.outputs, "code": made.code, "kernels": made.kernels}
        return Built(plain, {}, {}, lowered.chosen, text, reports)

    def assemble(self, built: Iterable[Built], folder: Path) -> tuple[str, ...]:
        """Make the libraries that nobody has made; the names of all. Raises BuildError when g++ fails."""
        kernels = {k["c"]: k["args"] for b in built for k in b.bundle["kernels"].values()}
        wanted = {_source(symbol): library_name(_source(symbol)) for symbol in (KERNEL, *kernels)}
        missing = {source: name for source, name in wanted.items() if find_library(name) is None}
        assert self._objects is not None
        for source in missing:
            self._objects.add(source)
        for source, name in missing.items():
            own = {symbol: kinds for symbol, kinds in kernels.items() if _source(symbol) == source}
            calls = "" if source == LOOPS or has_calls(source) else call_source(own, run=False)
            self._objects.library(source, made_here() / name, calls)
        return tuple(wanted.values())


def _source(symbol: str) -> Path:
    return LOOPS if symbol == KERNEL else c_kernel(symbol).source


@cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Of operators that are made of those that loops know."""
    aten = torch.ops.aten
    return get_decompositions([aten.native_layer_norm, aten.stack, aten.addcmul, aten.addcdiv, aten.lerp])
