"""sequence_mean: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.rows.sequence_mean import cpu  # noqa: F401
from graphllm.ops.rows.sequence_mean.op import sequence_mean

if importlib.util.find_spec("triton"):
    from graphllm.ops.rows.sequence_mean import triton_sequence_mean  # noqa: F401

__all__ = ["sequence_mean"]
