"""How many sequences run at once where each has recurrent states: a slot takes their memory whether it is used or not.

Only the compiler knows a model's states, so this is imported with it.
"""

from __future__ import annotations

from graphllm.compile.described import described
from graphllm.compile.families import find_model, local_model
from graphllm.compile.layout import plan_layout
from graphllm.config import CompileConfig
from graphllm.loading.artifact.resolve import fitting_sequences
from graphllm.loading.checkpoint.source import Source
from graphllm.weights.plan.plan import make_plan


def most_sequences(source: Source, config: CompileConfig, room: int) -> int:
    """Sequences for which there is memory before anything is built, see `fitting_sequences`."""
    fields, ranks = described(source.config, config.max_model_len), config.tensor_parallel_size
    layout = plan_layout(*local_model(fields, ranks, config.enable_expert_parallel), config)
    if not layout.slot_bytes:
        return config.max_num_seqs
    model = find_model(fields)
    weights = make_plan(model, model.config(fields), config.dtype).total_bytes // ranks  # quantized ones are smaller
    return fitting_sequences(room, weights, layout.versions * layout.slot_bytes, config.max_num_seqs)
