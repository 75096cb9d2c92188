"""rope_attention: specification in op.py, kernels beside it."""

import importlib.util

from graphllm.ops.paged_attention.tuning import tuning_step
from graphllm.ops.rope_attention.op import rope_attention

if importlib.util.find_spec("triton"):
    from graphllm.ops.rope_attention import triton_rope_attention  # noqa: F401

rope_attention.tuning_inputs(tuning_step)

__all__ = ["rope_attention"]
