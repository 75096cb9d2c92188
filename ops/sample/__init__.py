"""sample: specification in op.py, kernels beside it."""

from graphllm.ops.sample.op import sample

__all__ = ["sample"]
