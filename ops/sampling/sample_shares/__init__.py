"""sample_shares: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.sampling.sample_shares.op import sample_shares

if importlib.util.find_spec("triton"):
    from graphllm.ops.sampling.sample_shares import triton_sample_shares  # noqa: F401

__all__ = ["sample_shares"]
