"""gguf_linear: specification in op.py, kernels in files of their own."""

from graphllm.ops.gemm.gguf_linear import cpu  # noqa: F401
from graphllm.ops.gemm.gguf_linear.op import gguf_linear

__all__ = ["gguf_linear"]
