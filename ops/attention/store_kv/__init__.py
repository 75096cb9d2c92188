"""store_kv: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.attention.store_kv import cpu  # noqa: F401
from graphllm.ops.attention.store_kv.op import store_kv

if importlib.util.find_spec("triton"):
    from graphllm.ops.attention.store_kv import triton_store_kv  # noqa: F401

__all__ = ["store_kv"]
