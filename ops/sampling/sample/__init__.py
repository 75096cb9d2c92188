"""sample: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.sampling.sample import cpu  # noqa: F401
from graphllm.ops.sampling.sample.op import sample

if importlib.util.find_spec("triton"):
    from graphllm.ops.sampling.sample import triton_sample  # noqa: F401

__all__ = ["sample"]
