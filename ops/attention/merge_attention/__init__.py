"""merge_attention: specification in op.py."""

from graphllm.ops.attention.merge_attention.op import merge_attention

__all__ = ["merge_attention"]
