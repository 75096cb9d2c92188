"""How many sequences run at once where each has recurrent states: a slot takes their memory whether it is used or not.

Only the compiler knows a model's states, so this is imported with it.
"""

from __future__ import annotations

from graphllm.compile.described import described
from graphllm.compile.families import find_model, local_model
from graphllm.compile.layout import plan_layout
from graphllm.config import CompileConfig
from graphllm.loading.artifact.resolve import check_fitting
from graphllm.loading.checkpoint.source import Source
from graphllm.weights.plan.plan import make_plan


def check_sequences(source: Source, config: CompileConfig, room: int) -> None:
    """Raise TooManySequencesError where the states of ``max_num_seqs`` sequences do not fit, before anything is built.
    room: see `room_of_rank`."""
    fields, ranks = described(source.config, config.max_model_len), config.tensor_parallel_size
    layout = plan_layout(*local_model(fields, ranks, config.enable_expert_parallel), config)
    if not layout.slot_bytes:
        return
    model = find_model(fields)
    weights = make_plan(model, model.config(fields), config.dtype).total_bytes // ranks  # quantized ones are smaller
    each, block = layout.versions * layout.slot_bytes, layout.blocks.bytes_per_block
    check_fitting(room, weights, each, block, config.max_num_seqs)
