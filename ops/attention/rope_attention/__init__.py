"""rope_attention: specification in op.py, kernels beside it."""

import importlib.util

from graphllm.ops.attention.paged_attention.tuning import tuning_step
from graphllm.ops.attention.rope_attention.op import rope_attention

if importlib.util.find_spec("triton"):
    from graphllm.ops.attention.rope_attention import triton_rope_attention  # noqa: F401

rope_attention.tuning_inputs(tuning_step)

__all__ = ["rope_attention"]
