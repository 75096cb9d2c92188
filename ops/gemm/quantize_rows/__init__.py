"""quantize_rows: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.gemm.quantize_rows.op import quantize_rows

if importlib.util.find_spec("triton"):
    from graphllm.ops.gemm.quantize_rows import triton_quantize_rows  # noqa: F401

__all__ = ["quantize_rows"]
