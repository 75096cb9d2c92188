"""gguf_linear: specification in op.py, kernels beside it."""

from graphllm.ops.gemm.gguf_linear import cpu  # noqa: F401
from graphllm.ops.gemm.gguf_linear.op import gguf_linear

__all__ = ["gguf_linear"]
