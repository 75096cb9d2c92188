"""lm_head: specification in op.py, kernels beside it."""

from graphllm.ops.lm_head import cpu  # noqa: F401
from graphllm.ops.lm_head.op import lm_head

__all__ = ["lm_head"]
