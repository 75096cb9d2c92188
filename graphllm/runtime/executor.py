"""Executor: binds an artifact's programs to weights, caches and static buffers, and runs steps without waiting for
them.

On a GPU each padded size is captured once, lazily, as CUDA graphs, then replayed. On a CPU the bound calls run in a
thread. Knows nothing of requests: a step is arrays in, token ids out, and slots are rows of the state that stays on the
device.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from graphllm.config import Bucket, ConfigError
from graphllm.pages import zeros
from graphllm.program.schema import CacheGroup, CacheLayout
from graphllm.runtime import sizes
from graphllm.runtime.fresh import CacheMemory
from graphllm.runtime.kernels import CpuKernels, CudaKernels, Kernels, Launch
from graphllm.runtime.program import RESULTS, ZEROED, Bound, Call, LinkedProgram
from graphllm.runtime.staging import Staging, StepInput
from graphllm.runtime.stream import CpuStream, CudaStream, Job, Stream

_BOUND_KEPT = 128
_WARM_PROMPT = 128  # tokens
IN_PROMPT = 1 << 30  # flag of `adjust_logits` in the counts

Hook = Callable[[torch.Tensor], None]


class StepResult(NamedTuple):
    """What a step gave, on the host.

    tokens [R] int32: -1 where none can be chosen. scores: see `token_logprobs`, None unless asked for. whole: by row,
    log-probabilities [V] of the model's own distribution, for the rows that asked for all. logits [R, V]: a view of
    device memory that the next step overwrites. num_kept [n]: of each sequence of a step that verifies, how many of its
    tokens count; None for other steps.
    """

    tokens: np.ndarray
    scores: np.ndarray | None
    whole: dict[int, np.ndarray]
    logits: torch.Tensor
    num_kept: np.ndarray | None = None


class Frame:
    """A step that was started. ``wait`` gives its results, once. bucket: the name of its bucket. size: the T and S that
    it is padded to."""

    def __init__(self, rows: int, ring: int, bucket: str, size: tuple[int, int], runner: Runner) -> None:
        self.rows, self.ring, self.bucket, self.size, self.runner = rows, ring, bucket, size, runner
        self.job: Job | None = None
        self.scores: torch.Tensor | None = None
        self.tokens: np.ndarray | None = None
        self.whole: dict[int, torch.Tensor] = {}

    def wait(self) -> StepResult:
        """Block until the step is done. Raises what the device reported."""
        assert self.job is not None
        self.job.result()
        assert self.tokens is not None
        return StepResult(
            self.tokens.copy(),
            None if self.scores is None else self.scores.numpy().copy(),
            {row: values.cpu().numpy() for row, values in self.whole.items()},
            self.runner.results["logits"][: self.rows],
        )


class Executor:
    """Runs the programs of one artifact.

    folder: the artifact, already verified. weights: finished parameters by name. num_blocks: pages of the paged cache,
    the same in every cache tensor; page 0 is never written by a request. windows: attention window of each cache
    group, 0 for none. depends_on_length: cached keys depend on the context's length, so they cannot be shared. threads:
    of a CPU's kernels, None for torch's choice. cache: memory of those pages on a CPU, None to make it here. Raises
    ConfigError when the memory cannot be allocated.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        num_blocks: int,
        threads: int | None = None,
        cache: CacheMemory | None = None,
    ) -> None:
        compiled = manifest["factors"]["compile"]
        self.device = torch.device(compiled["target"]["device"])
        self.buckets = [Bucket(**b) for b in compiled["buckets"]]
        self.max_num_seqs, self.max_num_batched_tokens = compiled["max_num_seqs"], compiled["max_num_batched_tokens"]
        self.max_logprobs, self.max_logit_bias = compiled["max_logprobs"], compiled["max_logit_bias"]
        self.block_size, self.num_blocks = compiled["block_size"], num_blocks
        program = json.loads((folder / "program.json").read_text())
        self.vocab = program["vocab"]
        self.windows = tuple(program["kv"]["windows"])
        self.depends_on_length = program["kv"]["depends on length"]
        self.state = {n.removeprefix("state."): self._zeros(s, d) for n, (d, s) in program["state"].items()}
        self._cache = cache
        self._kv = self._allocate_kv(program["kv"])
        self._outside = (
            dict(weights)
            | {f"state.{n}": t for n, t in self.state.items()}
            | {f"kv.{i}": t for i, t in enumerate(self._kv)}
        )
        self._folder, self._described = folder / "pieces", program["programs"]
        self._bundles: dict[str, Any] = {}
        self._programs: dict[tuple[str, str], LinkedProgram] = {}
        self._outside[ZEROED] = torch.zeros(max(manifest["memory"]["zeroed"], 1), dtype=torch.int32, device=self.device)
        self._arena = self._zeros((max(manifest["memory"]["arena"], 1),), "uint8")
        self._stream: Stream = (
            CpuStream(threads or torch.get_num_threads()) if self.device.type == "cpu" else CudaStream()
        )
        self._kernels = self._open_kernels()
        limits = [b.limits(self.max_num_seqs) for b in self.buckets]
        most = {n: max(limit[n] for limit in limits) for n in "TS"}
        self.max_rows = most["S"]
        self._staging = Staging(program["step"], most, self.max_num_seqs, self.device)
        pin = self.device.type == "cuda"
        self._tokens = [torch.zeros(most["S"], dtype=torch.int32, pin_memory=pin) for _ in range(Staging.rings)]
        width = 2 + 2 * self.max_logprobs
        self._scores = [torch.zeros(most["S"], width, pin_memory=pin) for _ in range(Staging.rings)]
        self._jobs: list[Job | None] = [None] * Staging.rings
        self._turn = 0
        self._bound: OrderedDict[tuple[str, str, int, int], Runner] = OrderedDict()
        # One pool for all graphs, which never run at once: libraries take their workspace from it once.
        self._graphs = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def _zeros(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        kind = getattr(torch, dtype)
        if self.device.type == "cuda":
            return torch.zeros(shape, dtype=kind, device=self.device)
        return torch.from_numpy(zeros(math.prod(shape) * kind.itemsize)).view(kind).view(*shape)

    def _allocate_kv(self, kv: Mapping[str, Any]) -> list[torch.Tensor]:
        # Zeroed: a page's unused tail is multiplied by a weight of zero, which must not meet NaN.
        shape, dtype = (self.num_blocks, *kv["page"]), getattr(torch, kv["dtype"])
        if self.device.type == "cpu":
            self._cache = self._cache or CacheMemory(kv["tensors"], shape[0], math.prod(shape[1:]) * dtype.itemsize)
            return [torch.from_numpy(t).view(dtype).view(shape) for t in self._cache.tensors]
        try:
            return [self._zeros(shape, kv["dtype"]) for _ in range(kv["tensors"])]
        except RuntimeError as failure:
            raise ConfigError(
                f"kv cache: {self.num_blocks} pages do not fit in memory ({failure}); lower --kv-cache-memory or "
                "--gpu-memory-utilization"
            ) from failure

    def _open_kernels(self) -> Kernels:
        if isinstance(self._stream, CudaStream):
            return CudaKernels(self._folder, self._stream.handle)
        library = self._folder / "kernels.so"
        return CpuKernels(library if library.exists() else None)

    def _program(self, name: str, bucket: Bucket) -> LinkedProgram:
        if (name, bucket.name) not in self._programs:
            described = self._described[name]
            calls = [Call(self._bundle(p, bucket), inputs, outputs) for p, inputs, outputs in described["calls"]]
            program = LinkedProgram(calls, RESULTS, bucket.limits(self.max_num_seqs), described["parts"])
            if program.arena_bytes > self._arena.numel():
                raise ConfigError("the artifact's memory table is that of another version of graphllm; compile again")
            self._programs[name, bucket.name] = program
        return self._programs[name, bucket.name]

    def _bundle(self, piece: str, bucket: Bucket) -> Any:
        file = f"{piece}-{bucket.name}.json"
        if file not in self._bundles:
            self._bundles[file] = json.loads((self._folder / file).read_text())
        return self._bundles[file]

    def pick(self, tokens: int, rows: int, decode: bool) -> tuple[Bucket, int, int]:
        """The bucket for a batch, and the T and S it is padded to. rows: the larger one of sequences and sampled
        rows."""
        if self.device.type == "cpu":
            return sizes.pick_exact(self.buckets, tokens, rows, decode)
        return sizes.pick(self.buckets, tokens, rows, decode, self.max_num_seqs)

    def start(self, step: StepInput, full: bool = False) -> Frame:
        """Start a step; returns at once. With ``full`` it stops at the logits and `sample` must follow."""
        tokens, seqs, rows = len(step.token_ids), len(step.seq_lens), len(step.logits_indices)
        decode = tokens == seqs == rows
        bucket, T, S = self.pick(tokens, max(seqs, rows), decode)
        ring = self._turn
        self._turn = (ring + 1) % Staging.rings
        if (before := self._jobs[ring]) is not None:
            before.result()
        self._staging.fill(ring, step, T, S)
        runner = self._runner("full" if full else "plain", bucket, T, S)
        frame = Frame(rows, ring, bucket.name, (T, S), runner)
        highest = int(step.block_table.max(initial=0)) if self._cache else 0

        def work() -> None:
            if self._cache:
                self._cache.reach(highest)
            self._staging.upload(ring, T, S)
            runner.run("")
            if not full:
                self._download(frame, scores=False)

        frame.job = self._jobs[ring] = self._stream.submit(work)
        return frame

    def sample(
        self,
        frame: Frame,
        mask: np.ndarray | None = None,
        scores: bool = False,
        whole: Sequence[int] = (),
        hook: Hook | None = None,
    ) -> None:
        """Go on with a full step: edit the logits, sample, report logprobs.

        mask [M, ceil(V / 32)] int32: rows for ``mask_row``. scores: whether any row wants logprobs. whole: rows that
        want those of the whole vocabulary. hook: edits the float32 logits [R, V] in place, last before sampling.
        """
        T, S = frame.size
        if mask is not None:
            self._staging.fill_mask(frame.ring, mask, T, S)

        def work() -> None:
            if mask is not None:
                self._staging.upload_mask(frame.ring, len(mask), T, S)
            frame.runner.run("adjust")
            if hook is not None:
                hook(frame.runner.results["adjusted"][: frame.rows])
            frame.runner.run("sample")
            if scores:
                frame.runner.run("logprobs")
            for row in whole:
                logits = torch.nan_to_num(frame.runner.results["logits"][row].float(), nan=-math.inf)
                frame.whole[row] = torch.log_softmax(logits, dim=-1)
            self._download(frame, scores)

        frame.job = self._jobs[frame.ring] = self._stream.submit(work)

    def _download(self, frame: Frame, scores: bool) -> None:
        results = frame.runner.results
        if frame.runner.tokens is not None:
            frame.tokens = frame.runner.tokens[: frame.rows].copy()
        else:
            tokens = self._tokens[frame.ring][: frame.rows]
            tokens.copy_(results["tokens"][: frame.rows], non_blocking=True)
            frame.tokens = tokens.numpy()
        if scores:
            frame.scores = self._scores[frame.ring][: frame.rows]
            frame.scores.copy_(results["scores"][: frame.rows], non_blocking=True)

    def run(self, step: StepInput) -> StepResult:
        """Run one plain step to its end."""
        return self.start(step).wait()

    def warm_up(self) -> None:
        """Run a step of each bucket's largest decode size and a short prompt, so that kernels and libraries are loaded
        before the first request. It writes to page 0 and the scrap slot only."""
        for bucket in self.buckets:
            prompt = bucket.kind == "mixed"
            count = min(bucket.hi, _WARM_PROMPT) if prompt else bucket.hi
            rows = 1 if prompt else count
            ends = np.arange(1, rows + 1, dtype=np.int32) * (count // rows)
            zeros = np.zeros(count, dtype=np.int32)
            length = np.full(rows, count // rows, dtype=np.int32)
            pages = np.zeros((len(self.windows), rows, -(-(count // rows) // self.block_size)), dtype=np.int32)
            starts = np.concatenate([zeros[:1], ends])
            self.run(StepInput(zeros, zeros, zeros + 1, ends - 1, starts, length, pages))

    def set_slot(self, slot: int, prompt: Sequence[int], output: Sequence[int], bias: Mapping[int, float]) -> None:
        """Prepare a slot's penalty counts (for both lists) and logit bias, in order with the steps."""
        counts = np.zeros(self.vocab, dtype=np.int32)
        np.add.at(counts, np.asarray(output, dtype=np.int64), 1)
        counts[np.asarray(prompt, dtype=np.int64)] |= IN_PROMPT
        given = [
            torch.from_numpy(counts),
            torch.tensor(list(bias), dtype=torch.int32),
            torch.tensor(list(bias.values())),
        ]
        if self.device.type == "cuda":  # from other memory a copy would wait for the steps before it
            given = [g.pin_memory() for g in given]

        def work() -> None:
            for name, values in zip(("counts", "bias_token", "bias_value"), given, strict=True):
                self.state[name][slot, : len(values)].copy_(values, non_blocking=True)

        self._stream.submit(work)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages (from, to) in every cache tensor, in order with the steps."""

        def work() -> None:
            for cache in self._kv:
                for source, target in pairs:
                    cache[target].copy_(cache[source])

        self._stream.submit(work)

    device_drafts = False  # whether sequences that have sampled a token have drafts in slot states

    @property
    def layout(self) -> CacheLayout:
        """The states of the loaded model."""
        groups = [CacheGroup("window" if w else "full", w, self.block_size) for w in self.windows]
        return CacheLayout(tuple(groups), self.num_blocks)

    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        """What those blocks hold in all cache tensors, once all steps so far are done."""
        self.synchronize()
        rows = [torch.cat([cache[b].reshape(-1).view(torch.uint8) for cache in self._kv]) for b in blocks]
        return [row.cpu().numpy().tobytes() for row in rows]

    def write_blocks(self, blocks: Sequence[int], data: Sequence[bytes]) -> None:
        """Fill blocks with what `read_blocks` gave, in order with the steps."""
        rows = [torch.frombuffer(bytearray(d), dtype=torch.uint8).to(self.device) for d in data]

        def work() -> None:
            if self._cache:
                self._cache.reach(max(blocks))
            for block, row in zip(blocks, rows, strict=True):
                for cache, part in zip(self._kv, row.chunk(len(self._kv)), strict=True):
                    cache[block].copy_(part.view(cache.dtype).view(cache[block].shape))

        self._stream.submit(work)

    @property
    def kernels_done(self) -> int:
        """See `Kernels.done`; any thread may ask."""
        return self._kernels.done

    def synchronize(self) -> None:
        """Wait for everything submitted so far."""
        self._stream.submit(_nothing).result()

    def close(self) -> None:
        """Wait for everything and stop."""
        self._stream.close()

    def _runner(self, name: str, bucket: Bucket, T: int, S: int) -> Runner:
        key = (name, bucket.name, T, S)
        if key not in self._bound:
            outside = {**self._outside, **self._staging.tensors(T, S)}
            bound = self._program(name, bucket).bind(outside, self._arena, self._kernels, {"T": T, "S": S})
            self._bound[key] = Runner(bound, self._kernels, self._graphs if sizes.is_captured(bucket, T) else None)
            if len(self._bound) > _BOUND_KEPT:
                self._bound.popitem(last=False)
        self._bound.move_to_end(key)
        return self._bound[key]


class Runner:
    """A bound program. With ``graphs``, a memory pool, what can be is captured as CUDA graphs at a part's first run and
    replayed afterwards: one graph for the whole part when every piece is compiled, one between every two interpreted
    pieces otherwise. tokens: of the results, as the host sees them on a CPU."""

    def __init__(self, bound: Bound, kernels: Kernels, graphs: Any | None) -> None:
        self._parts, self._graphs, self.results = bound.parts, graphs, bound.results
        tokens = bound.results["tokens"]
        self.tokens = tokens.numpy() if tokens.device.type == "cpu" else None
        self._launches = {
            name: kernels.join([launch for _, ls in segments for launch in ls])
            for name, segments in bound.parts.items()
        }
        self._captured: set[str] = set()

    def run(self, part: str) -> None:
        """Run a part of the step on the current stream."""
        for launch in self._launches[part]:
            launch()
        if self._graphs is not None and part not in self._captured:
            # This first run was real and warmed the libraries up. Capturing executes nothing, so no state is touched
            # twice.
            torch.cuda.current_stream().synchronize()
            segments = self._parts[part]
            self._launches[part] = [
                launch for safe, ls in segments for launch in (_capture(ls, self._graphs) if safe else ls)
            ]
            self._captured.add(part)


def _capture(launches: Sequence[Launch], pool: Any) -> list[Launch]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
        for launch in launches:
            launch()
    return [graph.replay]


def _nothing() -> None:
    """Work that only marks a place in the queue."""
