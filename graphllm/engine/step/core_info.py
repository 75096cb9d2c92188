"""What fronts must know of a core, and the limits of its scheduler."""

from __future__ import annotations

from graphllm.config import SchedulerConfig
from graphllm.engine.requests.request import CoreInfo
from graphllm.engine.schedule.scheduler_output import SchedulerLimits
from graphllm.engine.step.step_executor import StepExecutor


def core_info(executor: StepExecutor, max_len: int, capacity: int) -> CoreInfo:
    """What fronts must know of a core. capacity: tokens of the longest sequence that its cache holds."""
    return CoreInfo(
        max_model_len=max_len,
        vocab=executor.vocab,
        max_num_seqs=executor.max_num_seqs,
        max_num_batched_tokens=executor.max_num_batched_tokens,
        block_size=executor.layout.block_size,
        num_blocks=executor.layout.num_blocks,
        capacity=capacity,
        max_logprobs=executor.vocab if executor.max_logprobs == -1 else executor.max_logprobs,
        max_logit_bias=executor.max_logit_bias,
        device=executor.device.type,
        task=executor.task,
        vector_size=executor.vector[1],
        vectors="token" if executor.vector[0] == "T" else "sequence",
        adapted=list(executor.adapted),
        max_lora_rank=executor.max_lora_rank,
    )


def scheduler_limits(
    executor: StepExecutor, options: SchedulerConfig, max_len: int, pipeline_depth: int, min_batch_per_stage: int
) -> SchedulerLimits:
    """The limits of an executor's scheduler. max_len: tokens of a sequence. The others: see `PipelineShare`."""
    return SchedulerLimits(
        max_num_seqs=executor.max_num_seqs,
        max_num_batched_tokens=executor.max_num_batched_tokens,
        max_num_rows=executor.max_rows,
        max_len=max_len,
        block_size=executor.layout.block_size,
        max_num_queued_reqs=options.max_num_queued_reqs,
        policy=options.scheduling_policy,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        snapshot_interval=options.snapshot_interval,
        pipeline_depth=pipeline_depth,
        min_batch_per_stage=min_batch_per_stage,
    )
