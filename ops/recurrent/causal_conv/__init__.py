"""causal_conv: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.recurrent.causal_conv import cpu  # noqa: F401
from graphllm.ops.recurrent.causal_conv.op import causal_conv

if importlib.util.find_spec("triton"):
    from graphllm.ops.recurrent.causal_conv import triton_causal_conv  # noqa: F401

__all__ = ["causal_conv"]
