"""linear_add_norm: specification in op.py, kernels beside it."""

import importlib.util

from graphllm.ops.linear_add_norm.op import linear_add_norm

if importlib.util.find_spec("triton"):
    from graphllm.ops.linear_add_norm import triton_linear_add_norm  # noqa: F401

__all__ = ["linear_add_norm"]
