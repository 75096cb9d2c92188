"""selective_scan: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.recurrent.selective_scan import cpu, tuning  # noqa: F401
from graphllm.ops.recurrent.selective_scan.op import selective_scan

if importlib.util.find_spec("triton"):
    from graphllm.ops.recurrent.selective_scan import triton_selective_scan  # noqa: F401

__all__ = ["selective_scan"]
