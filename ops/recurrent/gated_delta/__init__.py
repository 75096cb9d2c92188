"""gated_delta: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.recurrent.gated_delta import cpu, tuning  # noqa: F401
from graphllm.ops.recurrent.gated_delta.op import gated_delta

if importlib.util.find_spec("triton"):
    from graphllm.ops.recurrent.gated_delta import triton_channels, triton_chunks, triton_gated_delta  # noqa: F401

__all__ = ["gated_delta"]
