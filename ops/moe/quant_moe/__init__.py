"""quant_moe: specification in op.py, kernels in files of their own."""

from graphllm.ops.moe.quant_moe import cpu  # noqa: F401
from graphllm.ops.moe.quant_moe.op import quant_moe

__all__ = ["quant_moe"]
