"""fused_linear: specification in op.py, kernels beside it."""

import importlib.util

from graphllm.ops.fused_linear import cpu  # noqa: F401
from graphllm.ops.fused_linear.op import fused_linear

if importlib.util.find_spec("triton"):
    from graphllm.ops.fused_linear import triton_fused_linear  # noqa: F401

__all__ = ["fused_linear"]
