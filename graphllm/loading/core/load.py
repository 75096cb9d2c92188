"""Loading an engine core: weights, executor, grammars, and a first run of the host's code."""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from graphllm.config import Bucket, CompileConfig, ConfigError, CoreConfig, SchedulerConfig
from graphllm.host.garbage_collection import keep_all, no_collections
from graphllm.loading.core.host import host_executor, without_torch
from graphllm.loading.core.rank import begin_weights, join_cores, rank_device, rank_place, rank_threads, stage_memory
from graphllm.loading.core.ranks import join_ranks, start_ranks
from graphllm.loading.memory import cache_counts, cpu_cache_memory
from graphllm.program.artifact import Artifact

if TYPE_CHECKING:
    import torch

    from graphllm.engine.core import EngineCore
    from graphllm.engine.experts.lockstep import CoreWaves
    from graphllm.engine.requests.options import LogitsProcessor
    from graphllm.engine.requests.request import Adapter
    from graphllm.engine.step.adapter_memory import AdapterMemory
    from graphllm.loading.core.early_start import EarlyStart
    from graphllm.runtime.executor import Executor
    from graphllm.runtime.ranks.rank_processes import WaitingRanks

_WARM_UP_TOKENS = 128  # of a prompt
_WARM_UPS = 2  # after these the first request takes 1.25 times as long as later ones, after 8 1.15


@no_collections()
def load_core(
    config: CoreConfig,
    phases: Callable[[str, float], None] = lambda name, seconds: None,
    processors: Sequence[LogitsProcessor] = (),
    exits: bool = False,
    waiting: WaitingRanks | None = None,
    begun: EarlyStart | None = None,
) -> EngineCore:
    """Load weights, open the artifact and make an engine core.

    phases: told the seconds of each start-up phase. processors: further logits processors, as objects. exits: the
    process is the core's own, and ends where a rank is gone whose work its threads wait for in vain. waiting:
    processes for the other ranks. begun: what has begun already. Raises ConfigError when memory does not suffice,
    RankError when a rank dies.
    """
    clock = _Phases(phases)
    artifact = Artifact.open(Path(config.load.artifact))
    compiled = artifact.config
    _check_peers(config, compiled.data_parallel_experts)
    own = rank_place(config, compiled.tensor_parallel_size, 0)
    memory, degree = stage_memory(artifact, own.stage), own.degree
    with contextlib.ExitStack() as undo:  # what a failure ends
        ranks = start_ranks(config, degree, undo, exits, waiting)
        if ranks is not None:
            config = ranks.config
            own = rank_place(config, compiled.tensor_parallel_size, 0)
        counts = cache = None
        if artifact.device == "cpu" and ranks is None:
            counts = cache_counts(compiled, memory, config.cache, config.parallel.data_parallel_size)
            cache = cpu_cache_memory(artifact.program.blocks, counts)
        if ranks is None and not processors and (load := without_torch(config, artifact)) is not None:
            assert counts is not None
            clock("artifact")
            arrays = load()
            clock("weights")
            executor = host_executor(artifact, config.load.threads, arrays, counts, cache)
            return _make_core(config, compiled, executor, (), clock, None)
        from graphllm.loading.core.early_start import (  # here, because without torch there is no need of it
            EarlyStart,
            begin_early,
        )

        if begun is None:  # where torch is there, nothing is gained, and its current device may not be the first
            begun = EarlyStart() if "torch" in sys.modules else begin_early(config, artifact)
        undo.callback(begun.close)
        clock("artifact")
        _import_torch()
        clock("import torch")
        from graphllm.runtime.stream import alone

        threads = rank_threads(config, own.here)  # of the process: within `alone` there is one
        with alone():
            device = rank_device(artifact.device, own)
            loading = undo.enter_context(begin_weights(config, artifact, device, own, begun.weights))
            weights = loading.tensors
            if ranks is not None or config.peers is not None:
                loading.finish()  # others wait for this process where it waits for them
            clock("weights")
            if ranks is not None:
                executor = join_ranks(ranks, artifact, memory, own, device, weights, threads, clock)
                undo.callback(executor.close)
            else:
                from graphllm.runtime.executor import Executor

                if counts is None:  # on a GPU, of what the weights have left
                    counts = cache_counts(compiled, memory, config.cache)
                blocks, snapshots = counts
                executor = Executor(artifact, weights, blocks, snapshots, threads, cache, functions=begun.functions)
            waves = None
            if config.peers is not None:
                waves = join_cores(config.peers, device)
                undo.callback(waves.close)
                clock("join the cores")
            core = _make_core(config, compiled, executor, processors, clock, waves)
            if ranks is None and waves is None:
                undo.callback(core.close)
            loading.finish()
            clock("weights")
        if ranks is not None:  # a core that nobody closes: the process could not leave the groups of its GPUs
            weakref.finalize(core, executor.close)
        undo.pop_all()
        return core


def _import_torch() -> None:
    """In a thread: tracebacks of what the import tries are kept, and hold the frames of all who called for it."""
    if "torch" not in sys.modules:
        with ThreadPoolExecutor(1, "graphllm-import") as importing:
            importing.submit(importlib.import_module, "torch").result()
        keep_all()


def _check_peers(config: CoreConfig, sharing: int) -> None:
    """Raise ConfigError where there are other cores than the artifact was compiled for."""
    there = 1 if config.peers is None else config.peers.count
    if there != sharing:
        raise ConfigError(
            f"data_parallel_experts is {sharing}: the artifact is of as many engine cores, and here is {there}; use "
            f"data_parallel_size {sharing} in one engine, or compile without enable_expert_parallel"
        )
    if sharing > 1 and config.parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size is {config.parallel.pipeline_parallel_size}: engine cores that share experts have "
            "one stage; use 1"
        )


def _make_core(
    config: CoreConfig,
    compiled: CompileConfig,
    executor: Executor,
    processors: Sequence[LogitsProcessor],
    clock: Callable[[str], None],
    waves: CoreWaves | None,
) -> EngineCore:
    from graphllm.engine.core import EngineCore
    from graphllm.engine.experts.expert_balancer import ExpertBalancer
    from graphllm.engine.parts.part import CoreSetup
    from graphllm.engine.requests.logits_processors import BatchLimits, ModelLimits, ProcessorConfig, adapted
    from graphllm.engine.structured.compilers import GrammarCompilers
    from graphllm.host.importing import imported

    named = [imported("logits_processors", name) for name in config.model.logits_processors]
    grammars = None
    tokenizer = Path(config.tokenizer or config.model.model)
    if (tokenizer / "tokenizer.json").is_file():
        backend = config.model.structured_outputs_backend
        grammars = GrammarCompilers(tokenizer, executor.vocab, frozenset(config.stop_ids), backend)
    clock("executor")
    cold: list[Bucket] = []
    if executor.device.type == "cuda":
        for bucket in executor.buckets:
            # Those of a single request now. Cores that step together begin together, so that none waits for another.
            if bucket.lo == 1 or waves is not None:
                executor.warm_up(bucket)
            else:
                cold.append(bucket)
        warm_up_host(executor, compiled.max_model_len, compiled.max_num_batched_tokens)
        clock("warm up")
    told = ProcessorConfig(
        ModelLimits(compiled.max_model_len, executor.vocab),
        BatchLimits(executor.max_num_seqs, executor.max_num_batched_tokens),
    )
    ready = [adapted(processor, told, executor.device) for processor in (*named, *processors)]
    setup = CoreSetup(
        grammars=grammars,
        processors=ready,
        speculation=config.speculation,
        adapters=_adapter_memory(executor, config, compiled.dtype),
        balancer=None if executor.experts is None else ExpertBalancer(executor.experts, config.parallel),
        waves=waves,
    )
    return EngineCore(
        executor,
        compiled.max_model_len,
        config.scheduler,
        setup,
        executor.pipeline_depth,
        executor.min_batch_per_stage,
        cold,
    )


def _adapter_memory(executor: Executor, config: CoreConfig, dtype: str) -> AdapterMemory:
    """What reads the files of adapters. Raises ConfigError where not all that a step may have find room."""
    from graphllm.engine.step.adapter_memory import AdapterMemory
    from graphllm.weights.adapters.adapters import adapter_digest, read_adapter

    count = executor.layout.max_adapters
    kept = count if config.lora.max_cpu_loras is None else config.lora.max_cpu_loras
    if kept < count:
        raise ConfigError(f"max_cpu_loras is {kept}: it must be at least max_loras, {count}")

    def read(adapter: Adapter) -> dict[str, torch.Tensor]:
        folder = Path(adapter.folder)
        if adapter_digest(folder) != adapter.digest:
            raise ConfigError(f"adapter {adapter.name!r}: the files in {folder} have changed; load it again")
        tables = read_adapter(folder, executor.adapted, executor.max_lora_rank, dtype)
        if executor.device.type == "cuda":  # from other memory a copy would wait for the steps before it
            tables = {name: table.pin_memory() for name, table in tables.items()}
        return tables

    return AdapterMemory(kept, read)


def warm_up_host(executor: Executor, max_model_len: int, max_num_batched_tokens: int) -> None:
    """Serve short requests with an engine core that is thrown away: the first time, host code is slow too."""
    from graphllm.config.requests.sampling_params import SamplingParams
    from graphllm.engine.core import EngineCore
    from graphllm.engine.requests.request import EngineRequest

    core = EngineCore(executor, max_model_len, SchedulerConfig())
    length = min(_WARM_UP_TOKENS, max_model_len - 2, max_num_batched_tokens)
    limit = 0 if executor.task == "pool" else 2
    for number in range(_WARM_UPS):
        params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0)
        prompt = [number] * length
        core.add(EngineRequest(id=f"{number}", prompt=prompt, params=params, stop_ids=[], limit=limit, seed=0))
        while core.unfinished:
            core.step()


class _Phases:
    def __init__(self, report: Callable[[str, float], None]) -> None:
        self._report, self._last = report, time.perf_counter()
        self._seconds: dict[str, float] = {}

    def __call__(self, name: str) -> None:
        """A phase ends, or a part of it."""
        now = time.perf_counter()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last
        self._report(name, self._seconds[name])
        self._last = now
