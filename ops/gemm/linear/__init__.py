"""linear: specification in op.py, kernels in files of their own."""

from graphllm.ops.gemm.linear import cpu  # noqa: F401
from graphllm.ops.gemm.linear.op import linear

__all__ = ["linear"]
