"""merge_attention: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.attention.merge_attention.op import merge_attention

if importlib.util.find_spec("triton"):
    from graphllm.ops.attention.merge_attention import triton_merge_attention  # noqa: F401

__all__ = ["merge_attention"]
