"""How many sequences run at once where each has recurrent states: a slot takes their memory whether it is used or not.

Only the compiler knows a model's states, so this is imported with it.
"""

from __future__ import annotations

from graphllm.compile.described import described
from graphllm.compile.families import find_model, local_model
from graphllm.compile.layout import plan_layout
from graphllm.config import CompileConfig
from graphllm.host.machine import gpu_memory, total_memory
from graphllm.loading.checkpoint.source import Source
from graphllm.weights.plan.plan import make_plan

_SHARE = 4  # one part in so many of what the weights leave is for states of slots, the rest for the cache


def most_sequences(source: Source, config: CompileConfig) -> int:
    """Sequences for which there is memory on this machine, a power of two; the config's number where so many fit."""
    fields, ranks = described(source.config, config.max_model_len), config.tensor_parallel_size
    layout = plan_layout(*local_model(fields, ranks, config.enable_expert_parallel), config)
    each = layout.versions * layout.slot_bytes
    memory = gpu_memory() * 9 // 10 if config.target.device == "cuda" else total_memory() // ranks
    if not each or not memory:
        return config.max_num_seqs
    model = find_model(fields)
    weights = make_plan(model, model.config(fields), config.dtype).total_bytes // ranks
    # Quantized weights are smaller than that.
    fitting = max(memory - weights, memory // 8) // _SHARE // each
    if fitting >= config.max_num_seqs:
        return config.max_num_seqs
    return 1 << max(0, fitting.bit_length() - 1)
