"""scaled_linear: specification in op.py, the library's product and a Triton kernel in files of their own."""

from graphllm.ops.gemm.scaled_linear import library, triton_tile  # noqa: F401
from graphllm.ops.gemm.scaled_linear.op import scaled_linear

__all__ = ["scaled_linear"]
