"""Executor: loads an artifact's programs and states, and runs steps without waiting for them.

On a GPU each padded size is captured once, lazily, as CUDA graphs, then replayed. On a CPU the bound calls run in a
thread. Knows nothing of requests: a step is arrays in, results out, and slots are rows of the state that stays on the
device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphllm.config import Bucket
from graphllm.program.artifact import Artifact
from graphllm.program.linking import EXCHANGE, ZEROED
from graphllm.program.schema import ExpertLayout
from graphllm.program.specs import InputSpec
from graphllm.program.stages import BEHIND, Stage, message_bytes, stage_reads
from graphllm.runtime.commands.command import Answered, Command, Query
from graphllm.runtime.commands.worker import Worker
from graphllm.runtime.cuda_functions import CudaFunctions
from graphllm.runtime.drafting import DraftRuns, DraftShape, prepare_drafts
from graphllm.runtime.graphs import BoundProgram, GraphPrograms
from graphllm.runtime.kernels import CpuKernels, CudaKernels, Kernels
from graphllm.runtime.memory.cpu_cache_memory import CacheMemory
from graphllm.runtime.memory.memory import Array, HostMemory, Memory
from graphllm.runtime.memory.padding import Size
from graphllm.runtime.memory.staging import StepInput, ragged
from graphllm.runtime.memory.states import States
from graphllm.runtime.profiling import PROFILE, drop_profile, named
from graphllm.runtime.staged_stream import StagedStream
from graphllm.runtime.stream import CpuStream, CudaStream, Job, Stream
from graphllm.weights.adapters.adapted import AdaptedLinear, linear_from

if TYPE_CHECKING:
    import torch

    from graphllm.runtime.expert_slots import ExpertSlots

_WARM_PROMPT = 128  # tokens
# Sequences of a step below which splitting it over the stages gains nothing: half of them take nearly as long.
_MIN_BATCH_PER_STAGE = {"cpu": 16, "cuda": 64}

Hook = Callable[["torch.Tensor"], None]


class StepResult(NamedTuple):
    """What a step gave, on the host.

    outputs: by name, the results that every step copies, and requested ones: tokens [R] int32 (-1 where none can be
    chosen), scores (see `token_logprobs`), pooled [R, D] and so on.
    whole: by row, log-probabilities [V] of the model's own distribution, for rows that asked for all.
    logits [R, V]: a view of device memory that the next step overwrites, None for a task without logits.
    """

    outputs: Mapping[str, np.ndarray]
    whole: dict[int, np.ndarray]
    logits: Array | None

    @property
    def tokens(self) -> np.ndarray:
        """Of the task "generate"."""
        return self.outputs["tokens"]


class StepHandle:
    """A step that was started. ``wait`` gives its results, once. size: what it is padded to."""

    def __init__(
        self, step: StepInput, buffer_index: int, size: Size, variant: str, program: BoundProgram, executor: Executor
    ) -> None:
        self.rows, self.counts = step.rows, {"T": step.tokens, "S": step.sequences, "R": step.rows}
        self.buffer_index, self.size, self.variant, self.program = buffer_index, size, variant, program
        self.jobs: list[Job] = []  # one for each stretch of the step, in order
        self._executor = executor
        self.drafts: DraftRuns | None = None
        self.wants_drafts = False
        self.outputs: dict[str, np.ndarray] = {}
        self.whole: dict[int, Callable[[], np.ndarray]] = {}

    def launch(self, work: Callable[[], None]) -> None:
        """Launch a part of the step."""
        job = self._executor.launch(self, work)
        self.jobs.append(job)
        if self.drafts is not None:
            self.drafts.belong_to(job)

    def settle(self) -> None:
        """Block until the step is done; its results lie in ``outputs`` until the second step after it starts. Raises
        what the device reported."""
        self._executor.stream.settle(self)
        for job in self.jobs:
            job.result()

    def wait(self) -> StepResult:
        """Block until the step is done. Raises what the device reported."""
        self.settle()
        logits = self.program.results.get("logits")
        return StepResult(
            {name: values.copy() for name, values in self.outputs.items()},
            {row: read() for row, read in self.whole.items()},
            None if logits is None else logits[: self.rows],
        )


class Executor:
    """Runs the programs of one artifact, in this process.

    weights: finished parameters by name.
    num_blocks: of the paged cache; no request writes block 0.
    num_snapshots: copies of recurrent states.
    threads: of a CPU's kernels; None: OpenMP's choice.
    cache: memory of the blocks on a CPU; None: it is made here.
    stage: of a pipeline; only its layers run here.
    rank: in the tensor-parallel group; it takes its own part of adapters.
    memory: `HostMemory` if weights are `HostArray`s; None: torch's.
    functions: the kernels of a GPU, if loading them has begun.

    Raises ConfigError when the memory cannot be allocated.
    """

    def __init__(
        self,
        artifact: Artifact,
        weights: Mapping[str, Array],
        num_blocks: int,
        num_snapshots: int = 0,
        threads: int | None = None,
        cache: CacheMemory | None = None,
        stage: Stage | None = None,
        rank: int = 0,
        memory: Memory | None = None,
        functions: CudaFunctions | None = None,
    ) -> None:
        config, program = artifact.config, artifact.program
        self.memory = memory or _torch_memory(artifact.device)
        self.device = self.memory.device
        self.max_num_seqs, self.max_num_batched_tokens = config.max_num_seqs, config.max_num_batched_tokens
        self.max_logprobs, self.max_logit_bias = config.max_logprobs, config.max_logit_bias
        self.vocab, self.shareable, self.vector = program.vocab, program.shareable, program.vector
        reads = None if stage is None else stage_reads(program, stage)
        self.states = States(program, self.memory, num_blocks, num_snapshots, cache, reads)
        self.layout = program.cache_layout(config, num_blocks, num_snapshots)
        self._drafts = DraftShape.of(program.drafts, self.layout.tree)
        self._kernels, stream = self._open_kernels(artifact.pieces, threads, functions)
        self.pipeline_depth = 1 if stage is None else stage.total
        self.in_flight = self.pipeline_depth + 1  # one more is prepared before the first of them has ended
        self.min_batch_per_stage = _MIN_BATCH_PER_STAGE[self.device.type]
        self.stream = StagedStream(stream, self.pipeline_depth)
        if stage is not None:
            from graphllm.ir.groups import links_of

            links_of(stage.total).reserve(*message_bytes(artifact, stage))
        device = "cpu" if self.device.type == "cpu" else str(self.device)
        self.worker = Worker(0, 1, device, weights, lambda work: self.stream.submit(work).result())
        outside = {**weights, **self.states.tensors}
        outside[ZEROED] = self.memory.zeros((max(artifact.memory.zeroed, 1),), "int32")
        table = _exchange(config.tensor_parallel_size) if self.device.type == "cuda" else None
        if table is not None:
            outside[EXCHANGE] = table
        arena = self.memory.zeros((max(artifact.memory.arena, 1),), "uint8")
        self._graphs = {
            # A step prepares two runs of a draft graph.
            g.name: GraphPrograms(
                artifact.pieces,
                g,
                outside,
                arena,
                self.memory,
                self._kernels,
                self.max_num_seqs,
                config.longest_query,
                self.in_flight * (2 if g.task == "draft" else 1),
                stage,
            )
            for g in program.graphs
        }
        self._main = next(iter(self._graphs.values()))
        self._drafter = next((g for g in self._graphs.values() if g.task == "draft"), None)
        self.device_drafts = self._drafter is not None or self.layout.history > 0
        self.outputs = self._main.outputs
        self.task, self.buckets, self.max_rows = self._main.task, self._main.buckets, self._main.most["R"]
        self.inputs = {**self._main.inputs, **(self._drafter.inputs if self._drafter is not None else {})}
        self.adapters: Mapping[str, tuple[int, ...]] = self.states.adapters
        self.experts = program.experts
        self.expert_slots = None if self.experts is None else _expert_slots(self.experts, weights, self.device)
        self.adapted = [linear_from(plain) for plain in program.adapted]
        self.rank = rank
        self.divided: Mapping[str, AdaptedLinear] = {a.name: a for a in self.adapted if a.division is not None}
        self.max_lora_rank = config.max_lora_rank if self.adapted else 0
        self.encoder = next((g for g in self._graphs.values() if g.task == "encode"), None)
        self.item_input = self._item_input()
        self._tables = [n for n, spec in self._main.inputs.items() if spec.provider == "block_table"]
        self._on_host: list[dict[str, Array]] = [{} for _ in range(self.in_flight)]
        self.block_bytes, self.snapshot_bytes = [self.states.block_bytes], [self.states.snapshot_bytes]  # by rank

    def _open_kernels(
        self, folder: Path, threads: int | None, functions: CudaFunctions | None
    ) -> tuple[Kernels, Stream]:
        if self.device.type == "cuda":
            stream = CudaStream()
            return CudaKernels(functions or CudaFunctions(folder), stream.handle), stream
        library = folder / "kernels.so"
        kernels = CpuKernels(library if library.exists() else None)
        if isinstance(self.memory, HostMemory):
            return kernels, CpuStream(threads or kernels.threads, kernels.set_threads)
        return kernels, _cpu_stream(threads)

    def start(self, step: StepInput, program: str = "plain", drafts: bool = False) -> StepHandle:
        """Start a step of the main graph; returns at once. A program with parts stops at its first one, and `sample`
        must follow. drafts: the result has those that all slots have for their next step, "drafts" [N, K], and of trees
        that grow "tree_parents" [N, K + 1], the node before each one.

        In a pipeline, the first run of a program at a size has no other step in flight. Loading and capturing may wait
        for all work of a GPU, including messages that another stage, which waits for the same, has not taken."""
        graph = self._main
        size, variant = graph.pick(step), graph.variant(program, step)
        first = not graph.has_run(variant, size)
        if first:
            self.stream.drain()
        self.stream.release(step.num_independent)
        index = graph.next_buffer()
        symbols = size.symbols
        graph.staging.fill(index, step, symbols)
        bound = graph.bound(variant, size)
        handle = StepHandle(step, index, size, variant, bound, self)
        handle.wants_drafts = drafts
        split = BEHIND in bound.parts
        whole = len(bound.parts) == 1 + split
        copied = graph.host_results(program)
        if self._drafter is not None:
            count = self.layout.ahead(self.layout.query_lens[-1]) - 1
            if step.num_drafts is not None:
                count = self.layout.ahead(step.num_drafts + 1) - 1
            handle.drafts = prepare_drafts(self._drafter, step, count, self._drafts)
        tables = (step.arrays[n] for n in self._tables if n in step.arrays)
        highest = max((int(t.max(initial=0)) for t in tables), default=0) if self.device.type == "cpu" else 0

        def layers() -> None:
            self.states.reach(highest)
            graph.staging.upload(index, symbols)
            bound.run()
            if whole and not split:
                self._finish(handle, copied)

        def after() -> None:
            graph.staging.upload(index, symbols)  # the device's buffer may hold the inputs of a later step
            bound.run(BEHIND)
            if whole:
                self._finish(handle, copied)

        handle.launch(layers)
        if split:
            self.stream.hold(handle, after)
            if first:
                self.stream.release(0)
        return handle

    def launch(self, handle: StepHandle, work: Callable[[], None]) -> Job:
        """Launch a part of a step, which reads its staging buffer."""
        if PROFILE in self.worker.kept:
            work = named(work, f"{handle.counts['T']} tokens of {handle.counts['S']} sequences")
        job = self._main.jobs[handle.buffer_index] = self.stream.submit(work)
        return job

    def do(self, command: Command) -> None:
        """Have every rank run a command, in order with the steps. Raises ConfigError as `Command.check` does."""
        command.check(self)
        command.run(self)

    def ask(self, query: Query, timeout: float | None = None) -> list[Answered]:
        """The answers of all ranks, once all steps before have ended. timeout: seconds after which a rank without an
        answer counts as gone."""
        query.check(self)
        return [query.run(self)]

    def in_order(self, work: Callable[[], None]) -> None:
        """Launch work in order with the steps."""
        self.stream.in_order(work)

    def _item_input(self) -> tuple[InputSpec | None, int]:
        if self.encoder is None:
            return None, 0
        found = (spec for spec in self.encoder.inputs.values() if spec.provider == "item")
        return next(found, None), self.encoder.most["T"]

    def sample(
        self,
        handle: StepHandle,
        mask: np.ndarray | None = None,
        scores: bool = False,
        whole: Sequence[int] = (),
        hook: Hook | None = None,
    ) -> None:
        """Go on with a step of the program "full": edit the logits, sample, report logprobs.

        mask [M, ceil(V / 32)] int32: rows for ``mask_row``.
        scores: whether any row wants logprobs.
        whole: rows that want logprobs of the whole vocabulary.
        hook: edits the float32 logits [R, V] in place, last before sampling.
        """
        graph, symbols, bound = self._main, handle.size.symbols, handle.program
        if mask is not None:
            graph.staging.fill_late(handle.buffer_index, "mask", mask, symbols)
        copied = graph.host_results("full") | ({"scores": "R"} if scores else {})
        parts = ("adjust", "sample", *(["logprobs"] if scores else []))
        if not all(graph.has_run(handle.variant, handle.size, part) for part in parts):
            self.stream.drain()

        def work() -> None:
            if mask is not None:
                graph.staging.upload_late(handle.buffer_index, "mask", len(mask), symbols)
            bound.run("adjust")
            if hook is not None:
                hook(bound.results["adjusted"][: handle.rows])
            bound.run("sample")
            if scores:
                bound.run("logprobs")
            for row in whole:
                kept = bound.results["path_rows"][row] if "path_rows" in bound.results else row
                handle.whole[row] = self.memory.log_softmax(bound.results["logits"][kept])
            self._finish(handle, copied)

        self.stream.then(handle, work)

    def _finish(self, handle: StepHandle, wanted: Mapping[str, str | int]) -> None:
        """End a step, in the order of the current stream: copy results to the host, then draft, in the memory that held
        them. wanted: by the result's name, its rows: T, S, R or a number."""
        for name, symbol in wanted.items():
            count = symbol if isinstance(symbol, int) else handle.counts[symbol]
            if name in handle.program.on_host:
                handle.outputs[name] = handle.program.on_host[name][:count].copy()
                continue
            result = handle.program.results[name]
            if name not in self._on_host[handle.buffer_index]:  # of all steps: a GPU may wait for all that it does
                most = symbol if isinstance(symbol, int) else self._main.most[symbol]
                for kept in self._on_host:
                    kept[name] = self.memory.read_into(result, (most, *result.shape[1:]))
            part = self._on_host[handle.buffer_index][name][:count]
            part.copy_(result[:count], non_blocking=True)
            handle.outputs[name] = part.numpy()
        if handle.drafts is not None:
            handle.drafts.run()
        if handle.wants_drafts:
            kept = self._on_host[handle.buffer_index]
            for name in ("drafts", "tree_parents"):  # the tree of those that grow one
                if (state := self.states.tensors.get(f"state.{name}")) is None:
                    continue
                if name not in kept:
                    kept[name] = self.memory.read_into(state, state.shape)
                kept[name].copy_(state, non_blocking=True)
                handle.outputs[name] = kept[name].numpy()

    def run(self, step: StepInput) -> StepResult:
        """Run one plain step to its end."""
        return self.start(step, "plain" if self.task == "generate" else self.task).wait()

    def warm_up(self, bucket: Bucket) -> None:
        """Run a step of a bucket's largest size, or a short prompt, so that its kernels are loaded and its graph is
        captured before a request needs them. It writes to block 0 and the scrap slot only."""
        prompt = bucket.kind == "mixed"
        count = max(bucket.lo, min(bucket.hi, _WARM_PROMPT)) if prompt else bucket.query_len * bucket.hi
        sequences = 1 if prompt else bucket.hi
        step = ragged([[0] * (count // sequences)] * sequences, [0] * sequences)
        if bucket.query_len > 1 and not prompt:
            rows = {"logits_indices": np.arange(count, dtype=np.int32)}
            step = StepInput(count, sequences, count, bucket.query_len, {**step.arrays, **rows})
        self.run(step)
        if optional := self._main.optional:
            given = {n: np.zeros((1,) * len(self._main.inputs[n].shape), np.int32) for n in optional}
            self.run(step._replace(arrays={**step.arrays, **given}))

    @property
    def kernels_done(self) -> int:
        """See `Kernels.done`; any thread may ask."""
        return self._kernels.done

    def check_health(self) -> None:
        """This process runs all steps, so there is nothing to check."""

    def synchronize(self) -> None:
        """Wait for everything submitted so far."""
        self.stream.synchronize()

    def close(self) -> None:
        """Wait for everything, stop, and free memory, even if somebody still holds this executor. Captured graphs must
        go before a group of ranks can be left. Another engine of this process needs the room of weights and states."""
        drop_profile(self.worker)
        self.stream.close()
        for graph in self._graphs.values():
            graph.release()
        self.states.release()
        self.worker.parameters = {}
        if self.device.type == "cuda":
            gc.collect()  # what was bound is held in circles
            _give_back()


def _torch_memory(device: str) -> Memory:
    import torch  # here, because on a CPU there may be no need of it

    from graphllm.runtime.memory.torch_memory import TorchMemory

    return TorchMemory(torch.device(device))


def _cpu_stream(threads: int | None) -> Stream:
    import torch

    return CpuStream(threads or torch.get_num_threads())


def _exchange(ranks: int) -> torch.Tensor | None:
    from graphllm.ir.groups import TENSOR, group_of

    # One rank needs none, even in a process that is a rank of another engine.
    return None if ranks == 1 else group_of(TENSOR, ranks).exchange


def _expert_slots(layout: ExpertLayout, weights: Mapping[str, torch.Tensor], device: torch.device) -> ExpertSlots:
    from graphllm.runtime.expert_slots import ExpertSlots

    return ExpertSlots(layout, weights, device)


def _give_back() -> None:
    import torch

    torch.cuda.empty_cache()
