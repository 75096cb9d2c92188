"""paged_attention: specification in op.py, kernels beside it."""

from graphllm.ops.paged_attention.op import paged_attention

__all__ = ["paged_attention"]
