"""Graphs of torch's operators as pieces: built by a codegen backend, linked, and run beside torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from graphllm.compile.codegen.backends import Backend
from graphllm.compile.codegen.jobs import Built
from graphllm.compile.trace import trace_unit
from graphllm.config import Bucket, CompileConfig, Target
from graphllm.host.libraries import Libraries
from graphllm.ir.exchange import exchange
from graphllm.ir.graph import Shapes, TensorSpec
from graphllm.ir.graph_form import to_json
from graphllm.program.artifact import libraries_of
from graphllm.program.linking import EXCHANGE, ZEROED, LinkedProgram, PieceCall, plan_memory
from graphllm.runtime.binding import bind
from graphllm.runtime.kernels import CpuKernels
from graphllm.runtime.memory.torch_memory import TorchMemory

Function = Callable[[dict[str, Tensor]], tuple[Tensor, ...]]
Graphs = Mapping[str, tuple[Function, Mapping[str, TensorSpec]]]
MEMORY = TorchMemory(torch.device("cpu"))
X = TensorSpec.contiguous("float32", "T", 8)  # every graph has the input x


def build(
    backend: Backend, graphs: Graphs, buckets: tuple[Bucket, ...], folder: Path
) -> tuple[dict[tuple[str, Bucket], Built], Libraries]:
    """All graphs for all buckets, and the libraries that they call. folder: for what they share."""
    config, found = CompileConfig(Target("cpu", ())), {}
    for name, (fn, extra) in graphs.items():
        shapes = Shapes("cpu")
        # An input that nothing reads would be dropped: each is a result, too.
        unit = trace_unit(name, {"x": X, **extra}, lambda v, fn=fn: (*fn(v), *v.values()), shapes)
        output = unit.graph.output_node()
        output.meta["val"] = tuple(n.meta["val"] for n in output.args[0])
        for bucket in buckets:
            found[name, bucket] = backend.build(to_json(unit.graph, shapes), bucket, config, {})
    return found, libraries_of(folder.parent, backend.assemble(found.values(), folder))


def inputs(extra: Mapping[str, TensorSpec], T: int, S: int) -> dict[str, Tensor]:
    """Random ones; integers are below T."""
    torch.manual_seed(T)
    given: dict[str, Tensor] = {}
    for name, spec in {"x": X, **extra}.items():
        shape, dtype = [{"T": T, "S": S}.get(str(d), d) for d in spec.shape], getattr(torch, spec.dtype)
        whole = not dtype.is_floating_point
        given[name] = torch.randint(0, T, shape, dtype=dtype) if whole else torch.randn(shape).to(dtype)
    return given


def run(built: Built, bucket: Bucket, given: dict[str, Tensor], count: int, S: int, shared: Libraries) -> list[Tensor]:
    """The results of a piece. Memory that nothing has been written to is NaN."""
    outputs = [f"o{i}" for i in range(count + len(given))]
    linked = LinkedProgram([PieceCall(built.bundle, list(given), outputs)], outputs)
    plan = plan_memory(linked, bucket.limits(5))
    arena = torch.full((max(plan.arena_bytes, 8),), 0xFF, dtype=torch.uint8)
    zeros = torch.zeros(max(plan.zeroed, 1), dtype=torch.int32)
    outside = {**given, ZEROED: zeros, EXCHANGE: exchange(given["x"], 2)}
    symbols = {"T": len(given["x"]), "S": S, "R": S}
    bound = bind(linked, plan, outside, arena, CpuKernels(shared), symbols, MEMORY)
    for _, launches in bound.parts[""]:
        for launch in launches:
            launch()
    assert not zeros.any()  # a generator would write the sum where the scratch was
    return [bound.results[out] for out in outputs[:count]]
