"""residual_moe: specification in op.py; the kernels are those of fused_moe."""

import importlib.util

from graphllm.ops.moe.residual_moe.op import residual_moe

if importlib.util.find_spec("triton"):
    from graphllm.ops.moe.residual_moe import triton_residual_moe  # noqa: F401

__all__ = ["residual_moe"]
