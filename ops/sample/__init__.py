"""sample: specification in op.py, kernels beside it."""

import importlib.util

from graphllm.ops.sample import cpu  # noqa: F401
from graphllm.ops.sample.op import sample

if importlib.util.find_spec("triton"):
    from graphllm.ops.sample import triton_sample  # noqa: F401

__all__ = ["sample"]
