"""fused_moe: specification in op.py, kernels beside it."""

import importlib.util

from graphllm.ops.fused_moe import cpu, tuning  # noqa: F401
from graphllm.ops.fused_moe.op import fused_moe

if importlib.util.find_spec("triton"):
    from graphllm.ops.fused_moe import gluon_tokens, triton_few_tokens, triton_many_tokens  # noqa: F401

__all__ = ["fused_moe"]
