"""An engine core around an executor: grammars, logits processors, adapters, and a first run of the host's code."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from graphllm.config import Bucket, ConfigError, CoreConfig, SchedulerConfig
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.core import EngineCore
from graphllm.engine.experts.expert_balancer import ExpertBalancer
from graphllm.engine.parts.part import CoreSetup
from graphllm.engine.requests.logits_processors import BatchLimits, ModelLimits, ProcessorConfig, adapted
from graphllm.engine.requests.request import Adapter, EngineRequest
from graphllm.engine.step.adapter_memory import AdapterMemory
from graphllm.engine.structured.compilers import GrammarCompilers
from graphllm.engine.transfer.connectors import find_connector
from graphllm.host.importing import imported
from graphllm.loading.artifact.successor import ArtifactSuccessor
from graphllm.loading.core.core_start import CoreStart
from graphllm.loading.tiers.disk_folder import open_disk_folder
from graphllm.loading.tiers.identity import cache_identity, identity_key
from graphllm.loading.tiers.usual_size import usual_size
from graphllm.runtime.executor import Executor
from graphllm.runtime.memory.memory import HostMemory
from graphllm.weights.adapters.adapters import adapter_digest, read_adapter

if TYPE_CHECKING:
    import torch

    from graphllm.engine.experts.lockstep import CoreWaves

_WARM_UP_TOKENS = 128  # of a prompt
_WARM_UPS = 2  # after these the first request takes 1.25 times as long as later ones, after 8 1.15


def make_core(start: CoreStart, executor: Executor, waves: CoreWaves | None = None) -> EngineCore:
    """The core of an executor. waves: the lockstep of engine cores that share experts. Raises ConfigError."""
    config, compiled, clock = start.config, start.compiled, start.clock
    named = [imported("logits_processors", name) for name in config.model.logits_processors]
    grammars = None
    tokenizer = Path(config.tokenizer or config.model.model)
    if (tokenizer / "tokenizer.json").is_file():
        backend = config.model.structured_outputs_backend
        grammars = GrammarCompilers(tokenizer, executor.vocab, frozenset(config.stop_ids), backend)
    clock("executor")
    tiers, scheduler, key = config.tiers, config.scheduler, ""
    leaves = tiers.kv_offloading_disk is not None or tiers.kv_transfer_config
    if leaves and tiers.kv_offloading_size and scheduler.enable_prefix_caching:
        checkpoint = None if start.stored.is_baked else start.stored.tensors.checkpoint
        identity = cache_identity(start.artifact, checkpoint, config.parallel.pipeline_parallel_size)
        key = identity_key(identity)
        if tiers.kv_offloading_disk is not None:
            tiers, scheduler = open_disk_folder(tiers, scheduler, identity)
        if tiers.transfer is not None and scheduler.cache_secret is None:
            secret = find_connector(tiers.transfer).shared_secret(tiers.transfer)
            scheduler = dataclasses.replace(scheduler, cache_secret=secret)
        clock("identity of the cache")
    if tiers.kv_offloading_size is None:
        size = usual_size(executor, scheduler.enable_prefix_caching, config.parallel.data_parallel_size)
        tiers = dataclasses.replace(tiers, kv_offloading_size=size)
    cold: list[Bucket] = []
    if executor.device.type == "cuda":
        for bucket in executor.buckets:
            # A single request's buckets now. Cores that step together begin together, so that none waits for another.
            if bucket.lo == 1 or waves is not None:
                executor.warm_up(bucket)
            else:
                cold.append(bucket)
        warm_up_host(executor, compiled.max_model_len, compiled.max_num_batched_tokens)
        clock("warm up")
    limits = ProcessorConfig(
        ModelLimits(compiled.max_model_len, executor.vocab),
        BatchLimits(executor.max_num_seqs, executor.max_num_batched_tokens),
    )
    ready = [adapted(processor, limits, executor.device) for processor in (*named, *start.processors)]
    setup = CoreSetup(
        grammars=grammars,
        processors=ready,
        speculation=config.speculation,
        adapters=_adapter_memory(executor, config, compiled.dtype),
        balancer=None if executor.experts is None else ExpertBalancer(executor.experts, config.parallel),
        waves=waves,
        successor=_successor(start, executor),
        sleep=config.sleep,
        tiers=tiers,
        identity=key,
        rank=config.parallel.data_parallel_rank or 0,
    )
    return EngineCore(
        executor,
        compiled.max_model_len,
        scheduler,
        setup,
        executor.pipeline_depth,
        executor.min_batch_per_stage,
        cold,
    )


def _successor(start: CoreStart, executor: Executor) -> ArtifactSuccessor | None:
    """What waits for the model's own code; None where none comes, and with several ranks, which take it later."""
    place = start.config.successor
    if place is None or start.ranks is not None or start.config.peers is not None:
        return None
    return ArtifactSuccessor(Path(place), start.artifact, not isinstance(executor.memory, HostMemory))


def _adapter_memory(executor: Executor, config: CoreConfig, dtype: str) -> AdapterMemory:
    """What reads the files of adapters. Raises ConfigError where the adapters of one step do not find room."""
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
    core = EngineCore(executor, max_model_len, SchedulerConfig())
    length = min(_WARM_UP_TOKENS, max_model_len - 2, max_num_batched_tokens)
    limit = 0 if executor.task == "pool" else 2
    for number in range(_WARM_UPS):
        params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0)
        prompt = [number] * length
        core.add(EngineRequest(id=f"{number}", prompt=prompt, params=params, stop_ids=[], limit=limit, seed=0))
        while core.unfinished:
            core.step()
