"""wide_linear: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.gemm.wide_linear.op import wide_linear

if importlib.util.find_spec("triton"):
    from graphllm.ops.gemm.wide_linear import triton_wide_linear  # noqa: F401

__all__ = ["wide_linear"]
