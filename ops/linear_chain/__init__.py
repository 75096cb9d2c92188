"""linear_chain: specification in op.py, kernels beside it."""

import importlib.util

from graphllm.ops.linear_chain.op import linear_chain

if importlib.util.find_spec("triton"):
    from graphllm.ops.linear_chain import triton_few_rows, triton_linear_chain, triton_some_rows  # noqa: F401

__all__ = ["linear_chain"]
