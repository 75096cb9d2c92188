"""linear: specification in op.py, kernels beside it."""

from graphllm.ops.linear import cpu  # noqa: F401
from graphllm.ops.linear.op import linear

__all__ = ["linear"]
