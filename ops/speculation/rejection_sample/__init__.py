"""rejection_sample: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.speculation.rejection_sample import cpu  # noqa: F401
from graphllm.ops.speculation.rejection_sample.op import draft_seed, rejection_sample

if importlib.util.find_spec("triton"):
    from graphllm.ops.speculation.rejection_sample import triton_rejection_sample  # noqa: F401

__all__ = ["draft_seed", "rejection_sample"]
