"""fused_moe: specification in op.py."""

from graphllm.ops.fused_moe.op import fused_moe

__all__ = ["fused_moe"]
