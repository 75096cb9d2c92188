"""What fronts must know of a core."""

from __future__ import annotations

from graphllm.engine.requests.request import CoreInfo
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
