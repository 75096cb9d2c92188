"""linear: specification in op.py, kernels beside it."""

from graphllm.ops.gemm.linear import cpu  # noqa: F401
from graphllm.ops.gemm.linear.op import linear

__all__ = ["linear"]
