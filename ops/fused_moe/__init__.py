"""fused_moe: specification in op.py, a C++ kernel in cpu.py."""

from graphllm.ops.fused_moe import cpu  # noqa: F401
from graphllm.ops.fused_moe.op import fused_moe

__all__ = ["fused_moe"]
