"""Executor: binds an artifact's programs to weights, caches and static buffers, and runs steps.

On a GPU each padded size is captured once, lazily, as CUDA graphs, then replayed. On a CPU the bound calls run in a
loop.
Knows nothing of requests: a step is arrays in, token ids out.
"""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from graphllm.config import Bucket, ConfigError
from graphllm.expr import value
from graphllm.runtime.kernels import CpuKernels, CudaKernels, Kernels, Launch
from graphllm.runtime.program import Bound, Call, LinkedProgram

_ALIGN = 64
# Sizes that are captured, relative to which a batch is padded: at most 25 % waste, few graphs.
_GRAPH_SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024)


class StepInput(NamedTuple):
    """One ragged batch, host arrays; `graphllm.ir.model.Step` says what the fields mean. S sequences, T tokens."""

    token_ids: np.ndarray
    positions: np.ndarray
    context_len: np.ndarray
    logit_rows: np.ndarray
    query_start: np.ndarray
    seq_len: np.ndarray
    block_table: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seed: np.ndarray
    draw: np.ndarray


class StepResult(NamedTuple):
    """Device tensors that stay valid until the next step. tokens [S] int32, logits [S, V]; rows past the batch's own
    sequences are padding."""

    tokens: torch.Tensor
    logits: torch.Tensor


class Executor:
    """Runs the programs of one artifact.

    artifact: its folder, already verified. weights: finished parameters by name. kv_pages: pages of the paged cache,
    the same in every layer. Raises ConfigError when the cache cannot be allocated.
    """

    def __init__(
        self, folder: Path, manifest: Mapping[str, Any], weights: Mapping[str, torch.Tensor], kv_pages: int
    ) -> None:
        compiled = manifest["factors"]["compile"]
        self.device = torch.device(compiled["target"]["device"])
        self.buckets = [Bucket(**b) for b in compiled["buckets"]]
        self.max_num_seqs, self.max_num_tokens = compiled["max_num_seqs"], compiled["max_num_tokens"]
        self.page_size, self.kv_pages = compiled["page_size"], kv_pages
        program = json.loads((folder / "program.json").read_text())
        self.max_pages_per_seq = program["step"]["step.block_table"][1][1]
        self.vocab = program["vocab"]
        self._specs = program["step"]
        self._outside = dict(weights) | self._allocate_kv(program["kv"])
        self._folder, self._calls = folder / "pieces", program["calls"]
        self._programs: dict[str, LinkedProgram] = {}
        self._arena = torch.empty(max(manifest["memory"]["arena"], 1), dtype=torch.uint8, device=self.device)
        self._stream = torch.cuda.Stream() if self.device.type == "cuda" else None
        self._kernels = self._open_kernels()
        limits = [b.limits(self.max_num_seqs) for b in self.buckets]
        self._staging = Staging(self._specs, {n: max(limit[n] for limit in limits) for n in "TS"}, self.device)
        self._bound: OrderedDict[tuple[str, int, int], Runner] = OrderedDict()

    def _allocate_kv(self, kv: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        shape = (self.kv_pages, *kv["page"])
        try:
            # Zeroed: a page's unused tail is multiplied by a weight of zero, which must not meet NaN.
            caches = [
                torch.zeros(shape, dtype=getattr(torch, kv["dtype"]), device=self.device) for _ in range(kv["layers"])
            ]
        except RuntimeError as failure:
            raise ConfigError(
                f"kv cache: {self.kv_pages} pages of {self.page_size} tokens do not fit in memory ({failure}); "
                "lower --kv-cache-memory or --gpu-memory-utilization"
            ) from failure
        return {f"kv.{i}": cache for i, cache in enumerate(caches)}

    def _open_kernels(self) -> Kernels:
        if self._stream is not None:
            return CudaKernels(self._folder, self._stream.cuda_stream)
        library = self._folder / "kernels.so"
        return CpuKernels(library if library.exists() else None)

    def _program(self, bucket: Bucket) -> LinkedProgram:
        if bucket.name not in self._programs:
            bundles: dict[str, Any] = {}
            for piece, _, _ in self._calls:
                if piece not in bundles:
                    bundles[piece] = json.loads((self._folder / f"{piece}-{bucket.name}.json").read_text())
            calls = [Call(bundles[piece], inputs, outputs) for piece, inputs, outputs in self._calls]
            program = LinkedProgram(calls, ("logits", "tokens"), bucket.limits(self.max_num_seqs))
            if program.arena_bytes > self._arena.numel():
                raise ConfigError("the artifact's memory table is that of another version of graphllm; compile again")
            self._programs[bucket.name] = program
        return self._programs[bucket.name]

    def pick(self, tokens: int, seqs: int, decode: bool) -> tuple[Bucket, int, int]:
        """The bucket for a batch, and the T and S it is padded to."""
        for bucket in self.buckets:
            if bucket.kind == "decode" and decode and bucket.lo <= tokens <= bucket.hi:
                T = self._padded(tokens, bucket.hi)
                return bucket, T, T
        for bucket in self.buckets:
            if bucket.kind == "mixed" and tokens <= bucket.hi:
                T = max(bucket.lo, self._padded(tokens, bucket.hi))
                S = 1 if bucket.hi == 1 else max(2, self._padded(seqs, self.max_num_seqs))
                return bucket, T, S
        raise ConfigError(f"no bucket of the artifact takes {tokens} tokens; compile with larger --buckets")

    def _padded(self, size: int, limit: int) -> int:
        if self._stream is None or size > _GRAPH_SIZES[-1]:
            return size
        return min(limit, next(g for g in _GRAPH_SIZES if g >= size))

    def run(self, step: StepInput) -> StepResult:
        """Run one step to the end of its launches; on a GPU the results are still being computed when this returns."""
        tokens, seqs = len(step.token_ids), len(step.seq_len)
        decode = tokens == seqs and bool((np.diff(step.query_start) == 1).all())
        bucket, T, S = self.pick(tokens, seqs, decode)
        runner = self._runner(bucket, T, S)
        with self._on_stream():
            self._staging.fill(step, T, S)
            runner.run()
        return runner.result

    def synchronize(self) -> None:
        """Wait for everything launched so far."""
        if self._stream is not None:
            self._stream.synchronize()

    def tokens(self, result: StepResult, seqs: int) -> np.ndarray:
        """The sampled ids of the batch's own sequences, on the host."""
        with self._on_stream():
            return result.tokens[:seqs].cpu().numpy().copy()

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()

    def _runner(self, bucket: Bucket, T: int, S: int) -> Runner:
        key = (bucket.name, T, S)
        if key not in self._bound:
            outside = {**self._outside, **self._staging.tensors(T, S)}
            with self._on_stream():
                bound = self._program(bucket).bind(outside, self._arena, self._kernels, {"T": T, "S": S})
            graphed = self._stream is not None and _GRAPH_SIZES[-1] >= T
            self._bound[key] = Runner(bound, graphed)
            if len(self._bound) > 128:
                self._bound.popitem(last=False)
        self._bound.move_to_end(key)
        return self._bound[key]


class Runner:
    """A bound program. With ``graphed``, what can be is captured as CUDA graphs at the first run and replayed
    afterwards:
    one graph for the whole step when every piece is compiled, one between every two interpreted pieces otherwise."""

    def __init__(self, bound: Bound, graphed: bool) -> None:
        self._segments, self._graphed, self._captured = bound.segments, graphed, False
        self._parts: list[Launch] = [launch for _, launches in bound.segments for launch in launches]
        self.result = StepResult(bound.results["tokens"], bound.results["logits"])

    def run(self) -> None:
        """Run the step on the current stream."""
        for part in self._parts:
            part()
        if self._graphed and not self._captured:
            # This first run was real and warmed the libraries up. Capturing executes nothing, so no state is touched
            # twice.
            torch.cuda.current_stream().synchronize()
            self._parts = [
                part for safe, launches in self._segments for part in (_capture(launches) if safe else launches)
            ]
            self._captured = True


def _capture(launches: Sequence[Launch]) -> list[Launch]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for launch in launches:
            launch()
    return [graph.replay]


class Staging:
    """The step's inputs in one buffer: filled on the host, copied to the device at once, read there in place."""

    def __init__(self, specs: Mapping[str, Any], limits: Mapping[str, int], device: torch.device) -> None:
        self._specs = specs
        self._layouts: dict[tuple[int, int], tuple[dict[str, tuple[int, int, list[int], str]], int]] = {}
        size = self._layout(limits["T"], limits["S"])[1]
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = self._host if device.type == "cpu" else torch.zeros(size, dtype=torch.uint8, device=device)

    def _layout(self, T: int, S: int) -> tuple[dict[str, tuple[int, int, list[int], str]], int]:
        """Offset, bytes, shape and dtype of every field, and the total."""
        if (T, S) in self._layouts:
            return self._layouts[T, S]
        fields, at = {}, 0
        for name, (dtype, shape, _) in self._specs.items():
            sizes = [value(d, {"T": T, "S": S}) for d in shape]
            count = int(np.prod(sizes)) * np.dtype(dtype).itemsize
            fields[name] = (at, count, sizes, dtype)
            at += -(-count // _ALIGN) * _ALIGN
        self._layouts[T, S] = fields, at
        return fields, at

    def tensors(self, T: int, S: int) -> dict[str, torch.Tensor]:
        """The device views for a padded size."""
        fields, _ = self._layout(T, S)
        return {
            name: self._device[at : at + count].view(getattr(torch, dtype)).view(shape)
            for name, (at, count, shape, dtype) in fields.items()
        }

    def fill(self, step: StepInput, T: int, S: int) -> None:
        """Write a batch, padded to T and S, and start the copy to the device. Padding sequences own no tokens."""
        fields, total = self._layout(T, S)
        buffer = self._host.numpy()
        for name, (at, count, shape, dtype) in fields.items():
            field = buffer[at : at + count].view(dtype).reshape(shape)
            given: Any = getattr(step, name.removeprefix("step."))
            if given.ndim == 2:
                field[: len(given), : given.shape[1]] = given
                field[len(given) :] = 0
            else:
                field[: len(given)] = given
                field[len(given) :] = given[-1] if name == "step.query_start" else 0
        if self._device is not self._host:
            self._device[:total].copy_(self._host[:total], non_blocking=True)


def stack_tables(tables: Sequence[Sequence[int]]) -> np.ndarray:
    """Block tables of unequal lengths as one [S, longest] int32 array, zero-padded."""
    width = max((len(t) for t in tables), default=1)
    out = np.zeros((len(tables), width), dtype=np.int32)
    for row, table in zip(out, tables, strict=True):
        row[: len(table)] = table
    return out
