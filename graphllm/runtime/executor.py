"""Executor: loads an artifact's programs and states, and runs steps without waiting for them.

On a GPU each padded size is captured once, when it is first needed, as CUDA graphs, then replayed. On a CPU the bound
calls run in a thread. An executor knows nothing of requests: a step is arrays in, results out, and slots are rows of
the state that stays on the device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from graphllm.config import Bucket
from graphllm.program.artifact import Artifact
from graphllm.program.linking import EXCHANGE
from graphllm.program.specs import InputSpec
from graphllm.program.stages import BEHIND, Stage, message_bytes, stage_reads
from graphllm.runtime.commands.command import Answered, Command, Query
from graphllm.runtime.commands.worker import Worker
from graphllm.runtime.cuda.functions import CudaFunctions
from graphllm.runtime.drafting import DRAFT_STATES
from graphllm.runtime.kernels import CpuKernels
from graphllm.runtime.memory.cpu_cache_memory import CacheMemory
from graphllm.runtime.memory.memory import Array, Memory
from graphllm.runtime.memory.staging import Sampling, StepInput, ragged
from graphllm.runtime.memory.states import States
from graphllm.runtime.offloading.weights import stored_parameters
from graphllm.runtime.opening import exchange, expert_slots, give_back, open_kernels, reserve_links, torch_memory
from graphllm.runtime.profiling import PROFILE, drop_profile, named
from graphllm.runtime.programs import Programs
from graphllm.runtime.staged_stream import StagedStream
from graphllm.runtime.step_handle import StepHandle, StepResult
from graphllm.runtime.stream import Job
from graphllm.weights.adapters.adapted import AdaptedLinear, linear_from

_WARM_PROMPT = 128  # tokens
# Sequences of a step below which splitting it over the stages gains nothing: half of them take nearly as long.
_MIN_BATCH_PER_STAGE = {"cpu": 16, "cuda": 64}


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
        self.memory = memory or torch_memory(artifact.device)
        self.device = self.memory.device
        self.max_num_seqs, self.max_num_batched_tokens = config.max_num_seqs, config.max_num_batched_tokens
        self.max_logprobs, self.max_logit_bias = config.max_logprobs, config.max_logit_bias
        self.vocab, self.shareable, self.vector = program.vocab, program.shareable, program.vector
        reads = None if stage is None else stage_reads(program, stage)
        self.states = States(program, self.memory, num_blocks, num_snapshots, cache, reads)
        self.layout = program.cache_layout(config, num_blocks, num_snapshots)
        kernels, stream = open_kernels(artifact, self.memory, threads, functions)
        self.pipeline_depth = 1 if stage is None else stage.total
        self.in_flight = self.pipeline_depth + 1  # one more is prepared before the first of them has ended
        self.min_batch_per_stage = _MIN_BATCH_PER_STAGE[self.device.type]
        self.stream = StagedStream(stream, self.pipeline_depth)
        if stage is not None:
            reserve_links(stage.total, message_bytes(artifact, stage))
        device = "cpu" if self.device.type == "cpu" else str(self.device)
        self.worker = Worker(0, 1, device, stored_parameters(weights), lambda work: self.stream.submit(work).result())
        self._outside = {**weights, **self.states.tensors}
        if (table := exchange(self.device.type, config.tensor_parallel_size)) is not None:
            self._outside[EXCHANGE] = table
        self._adopt(Programs(artifact, self._outside, self.memory, kernels, self.layout, self.in_flight, stage))
        self.device_drafts = self._drafter.drafts or self.layout.history > 0
        self._draft_states = self.states.named(DRAFT_STATES)
        self.outputs: Collection[str] = self._main.outputs
        self.task, self.buckets, self.max_rows = self._main.task, self._main.buckets, self._main.most["R"]
        self.inputs: Mapping[str, InputSpec] = {**self._main.inputs, **self._drafter.inputs}
        self.adapters: Mapping[str, tuple[int, ...]] = self.states.adapters
        self.experts = program.experts
        self.expert_slots = expert_slots(self.experts, weights, self.device)
        self.adapted: Sequence[AdaptedLinear] = [linear_from(plain) for plain in program.adapted]
        self.rank = rank
        self.divided: Mapping[str, AdaptedLinear] = {a.name: a for a in self.adapted if a.division is not None}
        self.max_lora_rank = config.max_lora_rank if self.adapted else 0
        self.encoder, self.item_input = self.programs.encoder, self.programs.item_input
        self._tables = [n for n, spec in self._main.inputs.items() if spec.provider == "block_table"]
        self.block_bytes, self.snapshot_bytes = [self.states.block_bytes], [self.states.snapshot_bytes]  # by rank

    def _adopt(self, programs: Programs) -> None:
        self.programs, self._main, self.snapshots = programs, programs.main, programs.snapshots
        self._drafter, self._on_host = programs.drafter, programs.on_host

    def prepare(self, artifact: Artifact) -> Programs:
        """Programs of another artifact of the same model, for `take`, on a CPU. In any thread, while steps run."""
        found = Programs(
            artifact, self._outside, self.memory, CpuKernels(artifact.libraries), self.layout, self.in_flight
        )
        found.bind_as(self.programs)
        return found

    def take(self, programs: Programs) -> None:
        """Run these programs from here on. No step is in flight."""
        self.synchronize()
        self.programs.release()
        self._adopt(programs)

    def start(self, step: StepInput, program: str = "plain", drafts: bool = False) -> StepHandle:
        """Start a step of the main graph; returns at once. A program with parts stops at its first one, and `sample`
        must follow. drafts: the result has those that all slots have for their next step, "drafts" [N, K], and of trees
        that grow "tree_parents" [N, K + 1], the node before each one.

        In a pipeline, a program that runs for the first time at a size runs by itself. Loading and capturing may wait
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
        handle = StepHandle(step, index, size, variant, bound, self.stream, self.launch)
        handle.more = self._draft_states if drafts else {}
        split = BEHIND in bound.parts
        whole = len(bound.parts) == 1 + split
        copied = graph.host_results(program)
        handle.drafts = self._drafter.prepare(step)
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

    def sample(self, handle: StepHandle, sampling: Sampling) -> None:
        """Go on with a step of the program "full": edit the logits, sample, report logprobs."""
        mask, scores, whole, hook = sampling
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
        """What ends a step, in the order of the current stream: copy results to the host, then draft, in the memory
        that held them. wanted: see `HostResults.copy`."""
        self._on_host.copy(handle, wanted)
        handle.drafts.run()
        self._on_host.copy_states(handle)

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
        return self.programs.kernels.done

    def check_health(self) -> None:
        """Nothing else runs the steps: this process is there."""

    def synchronize(self) -> None:
        """Wait for everything submitted so far."""
        self.stream.synchronize()

    def close(self) -> None:
        """Wait for everything, stop, and give memory back, whoever still holds this executor: captured graphs, without
        which a group of ranks cannot be left, weights and states: another engine of this process needs the room."""
        drop_profile(self.worker)
        self.stream.close()
        self.programs.release()
        self.states.release()
        self.worker.parameters = {}
        self._outside.clear()
        if self.device.type == "cuda":
            gc.collect()  # what was bound is held in circles
            give_back()
