"""quant_linear: specification in op.py, kernels in files of their own."""

from graphllm.ops.gemm.quant_linear import cpu  # noqa: F401
from graphllm.ops.gemm.quant_linear.op import quant_linear

__all__ = ["quant_linear"]
